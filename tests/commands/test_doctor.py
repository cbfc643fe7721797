from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path

import pytest

from falcon_lab.commands import doctor
from falcon_lab.commands.doctor import Finding, examine, flash_attn, lightning_script, package
from falcon_lab.errors import PluginWarning


def test_a_finding_that_is_not_well_says_what_to_do() -> None:
    assert str(Finding("torch", "2.13")) == "  torch              2.13"
    lines = str(Finding("torch", "not installed", "pip install torch")).splitlines()
    assert lines[0].startswith("! torch")
    assert lines[1].endswith("-> pip install torch")


def test_everything_is_looked_at() -> None:
    findings = list(examine())
    names = {finding.name for finding in findings}
    assert {"falcon-lab", "python", *doctor.REQUIRED, "cpu", "datasets", "flash-attn"} <= names
    assert {"cache", "bin/lightning"} <= names
    assert "cuda" in {name.partition(":")[0] for name in names}


def test_a_missing_package_and_a_malicious_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package("no-such-package").advice == "pip install no-such-package"
    monkeypatch.setattr(doctor, "version", lambda name: "2.6.2")
    assert "malware" in package("lightning").state
    assert package("torch").advice == ""


def test_flash_attention_is_known_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert flash_attn().state == "another package of that name; it is not used"
    module.flash_attn_with_kvcache = lambda: None  # type: ignore[attr-defined]
    assert flash_attn().state == "usable"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "not installed" in flash_attn().state


def test_a_plug_in_that_did_not_load_is_shown_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "falcon-lab-nowhere")
    with pytest.warns(PluginWarning):
        [finding] = list(doctor.plug_ins())
    assert finding.state.startswith("falcon-lab-nowhere did not load")
    assert "falcon-lab-nowhere" in finding.advice


def test_the_cache_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "none"))
    assert doctor.cache().state.endswith("(empty)")
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    (tmp_path / "weights").write_bytes(bytes(3 * 2**20))
    assert doctor.cache().state == f"{tmp_path} (3 MiB)"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """falcon-lab as pip leaves it: RECORD holds the digest of ``bin/lightning``."""
    site, script = tmp_path / "lib" / "site-packages", tmp_path / "bin" / "lightning"
    info = site / "falcon_lab-0.1.0.dist-info"
    info.mkdir(parents=True)
    script.parent.mkdir()
    script.write_bytes(b"ours")
    digest = doctor._sha256(script)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: falcon-lab\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(f"../../bin/lightning,sha256={digest},4\n")
    found = importlib.metadata.Distribution.at(info)
    monkeypatch.setattr(doctor, "distribution", lambda name: found)
    return script


def test_the_script_is_ours_as_long_as_its_digest_is_the_recorded_one(installed: Path) -> None:
    assert lightning_script() == Finding("bin/lightning", f"{installed} is ours")
    installed.write_bytes(b"theirs")
    assert "belongs to another package" in lightning_script().state
    assert "pip install --force-reinstall --no-deps falcon-lab" in lightning_script().advice
    installed.unlink()
    assert lightning_script().state == "has been deleted"


def test_a_checkout_that_is_not_installed_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "distribution", missing)
    assert lightning_script().advice == ""
    assert "not installed" in lightning_script().state
