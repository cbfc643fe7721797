from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import falcon_lab.cli
from falcon_lab import lightning_command
from falcon_lab.lightning_command import is_ours, main, other_owner

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes distributions that own a ``lightning`` script; each returns its own name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # no other owner, whatever is installed

    def make(distribution: str) -> None:
        module = distribution.replace("-", "_") + "_of_test"
        source = (
            f"import sys\ndef main():\n    print({distribution!r}, sys.argv[1:])\n    return 7\n"
        )
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[console_scripts]\nlightning = {module}:main\n")

    return make


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["lightning", *arguments])
    with pytest.raises(SystemExit) as leaving:
        main()
    return leaving.value.code


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (["run", "x.yaml"], True),
        (["run", "--dry-run", "x.yml", "seed=1"], True),
        (["run", "--trainer.max_steps=3", "a/b.yaml"], True),
        (["run", "job", "x.yaml"], False),
        (["run", "model", "x.py"], False),
        (["run"], False),
        (["run", "--help"], False),
        (["fit", "x.yaml"], False),
        (["x.yaml"], False),
        ([], False),
    ],
)
def test_only_run_with_a_yaml_is_ours(arguments: list[str], ours: bool) -> None:
    assert is_ours(arguments) is ours


def test_our_calls_reach_the_command_line_as_they_came(
    monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    install("lightning-sdk")
    seen = []
    monkeypatch.setattr(falcon_lab.cli, "main", lambda: seen.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["lightning", "run", "x.yaml", "seed=1"])
    main()
    assert seen == [["run", "x.yaml", "seed=1"]]


def test_other_calls_reach_the_other_owner_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("litserve")
    install("falcon-lab")  # ours must not be called again
    assert call(monkeypatch, "run", "job", "--help") == 7
    assert capsys.readouterr().out == "litserve ['run', 'job', '--help']\n"


def test_the_sdk_is_preferred_to_who_would_forward_to_it(install: Install) -> None:
    install("another")
    install("lightning_sdk")
    install("litserve")
    owner = other_owner()
    assert owner is not None
    assert owner.__module__ == "lightning_sdk_of_test"


def test_without_another_owner_the_usage_is_shown(
    monkeypatch: pytest.MonkeyPatch, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("falcon-lab")
    assert call(monkeypatch, "fit") == 2
    assert "usage: lightning run EXPERIMENT.yaml" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["lightning", "--help"])
    main()
    assert "usage: lightning run EXPERIMENT.yaml" in capsys.readouterr().out


def test_the_dispatcher_itself_imports_the_standard_library_alone() -> None:
    source = Path(lightning_command.__file__)
    program = (
        "import sys, runpy\n"
        "before = set(sys.modules)\n"
        f"runpy.run_path({str(source)!r})\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= set(sys.stdlib_module_names), new\n"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
