from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes.hub import TOKEN, Hub, hub
from falcon_lab import testing
from falcon_lab.config.schema import TargetConfig
from falcon_lab.model.loading import load_target
from falcon_lab.plugins.discovery import load_components
from installing import install_in_place
from running import ROOT, invoke, refused, run
from saved_models import save_untrained
from tiny_models import save_tiny

EAGLE = ROOT / "plugins" / "falcon-lab-eagle"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a target, EAGLE-3's head and Falcon's for it."""
    install_in_place(EAGLE, tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "target", layers=4)
    target = load_target(TargetConfig(name="target", device="cpu"))
    known = load_components()
    testing.save_for_export(tmp_path / "drafter", target, {"name": "eagle3"}, known)
    save_untrained(tmp_path / "falcon", target, known)
    return tmp_path


def test_a_drafter_goes_out_and_comes_back(folder: Path) -> None:
    assert "vLLM" in run("export", "drafter", "out", "--to", "vllm", "--draft-tokens", "3")
    card = (folder / "out" / "README.md").read_text()
    assert "vllm serve" in card
    assert '"num_speculative_tokens": 3' in card
    assert str(folder) not in card
    assert "vllm serve TARGET" in card
    assert "tags: [speculative-decoding, draft-model, eagle3, vllm]" in card
    run("export", "drafter", "out", "--to", "vllm", "--draft-tokens", "3", "--verify")
    run("import", "out", "back")
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (folder / "back" / name).read_bytes() == (folder / "drafter" / name).read_bytes()


def test_what_was_changed_since_is_found(folder: Path) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    config = json.loads((folder / "out" / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (folder / "out" / "config.json").write_text(json.dumps(config))
    done = invoke("export", "drafter", "out", "--to", "vllm", "--verify")
    assert done.exit_code == 1
    assert "[0, 1, 2], and should be [1, 2, 3]" in done.stdout
    assert "layer_ids" in refused("import", "out", "back")
    assert not (folder / "back").exists()


def test_an_export_replaces_a_former_one_and_nothing_else(folder: Path) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    run("export", "drafter", "out", "--to", "sglang")
    assert "eagle_config" in (folder / "out" / "config.json").read_text()
    assert not (folder / "out.1").exists()
    (folder / "out" / "notes.txt").write_text("mine")
    run("export", "drafter", "out", "--to", "vllm")
    assert (folder / "out.1" / "notes.txt").read_text() == "mine"


def test_what_cannot_be_exported_is_refused_with_the_reason(folder: Path) -> None:
    assert "no engine hosts" in refused("export", "falcon", "out", "--to", "vllm")
    assert "did you mean 'vllm'" in refused("export", "drafter", "out", "--to", "vlm")
    assert "choose another" in refused("export", "drafter", "drafter", "--to", "vllm")
    assert not (folder / "out").exists()


def test_a_folder_that_is_not_whole_is_neither_imported_nor_sent(folder: Path) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    weights = folder / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "not whole" in refused("import", "out", "back")
    assert "not whole" in refused("push", "out", "me/drafter")
    (folder / "out" / "falcon_lab.json").unlink()
    assert "damaged" in refused("import", "out", "back", "--target", "target")
    assert "falcon-lab export" in refused("push", "out", "me/drafter")


def test_a_folder_of_somebody_else_is_imported_for_a_target_that_is_named(folder: Path) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    (folder / "out" / "falcon_lab.json").unlink()
    assert "--target" in refused("import", "out", "back")
    assert "layers [1, 2, 3]" in run("import", "out", "back", "--target", "target")
    ours = (folder / "drafter" / "model.safetensors").read_bytes()
    assert (folder / "back" / "model.safetensors").read_bytes() == ours
    card = (folder / "back" / "README.md").read_text()
    assert "`out`" in card
    assert str(folder) not in card
    run("generate", "--drafter", "back", "--prompt", "a", "--max-new-tokens", "4")


def test_what_no_drafter_here_is_is_refused_with_what_would_be(folder: Path) -> None:
    said = refused("import", "target", "back", "--target", "target")
    assert "LlamaForCausalLM" in said
    assert "eagle3 (vLLM" in said
    (folder / "empty").mkdir()
    assert "config.json" in refused("import", "empty", "back", "--target", "target")
    assert "2,15,27" in refused("import", "target", "back", "--target", "target", "--taps", "two")


def test_another_target_is_refused(folder: Path) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    save_tiny(folder / "other", layers=3)
    assert "trained for" in refused("import", "out", "back", "--target", "other")
    assert "trained for" in refused("export", "drafter", "o", "--to", "vllm", "--target", "other")


def send(server: Hub, monkeypatch: pytest.MonkeyPatch, token: str, *words: str) -> Any:
    """``falcon-lab push`` to the stand-in."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", token)
    return invoke("push", "out", "me/drafter", *words)


def test_an_export_is_sent_to_the_hub_with_its_card(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    with hub() as server:
        done = send(server, monkeypatch, TOKEN, "--private")
        assert done.exit_code == 0, done.output
        assert f"{server.address}/me/drafter" in done.stdout
        assert server.repositories == {"me/drafter": True}
        assert server.messages == ["Drafter for target, as vllm reads it"]
        sent = server.files["me/drafter"]
    expected = {each.name: each.read_bytes() for each in (folder / "out").iterdir()}
    assert sent == expected


def test_a_hub_that_refuses_or_is_not_there_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("export", "drafter", "out", "--to", "vllm")
    with hub() as server:
        wrong = send(server, monkeypatch, "hf_wrong")
    assert wrong.exit_code == 2
    assert "log in" in wrong.stderr
    gone = send(server, monkeypatch, TOKEN)
    assert gone.exit_code == 2
    assert "network" in gone.stderr
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.rmtree(folder / "falcon")
    assert "HF_HUB_OFFLINE" in refused("push", "out", "me/drafter")


def test_an_ordinary_run_imports_nothing_of_it() -> None:
    """What imports the package: itself, its commands when they run, the checks, and formats."""
    sources = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    found = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if any(name.startswith("falcon_lab.export") for name in names):
                found.add(path)
    allowed = {"commands/export.py", "testing/exports.py"}
    formats = {
        path
        for path in found
        if path.name in ("exports.py", "imports.py") and "plugins" in path.parts
    }
    inside = {path for path in found if path.parent.name == "export"}
    rest = {"/".join(path.parts[-2:]) for path in found - formats - inside}
    assert rest == allowed
    top = ast.parse((ROOT / "src/falcon_lab/commands/export.py").read_text("utf-8")).body
    named = [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
    assert not [name for name in named if name.startswith("falcon_lab.export")]
