"""``falcon-lab dialogues`` with a tiny chat target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_targets import chat_target, save_chat_target
from falcon_lab.config.schema import DataConfig
from falcon_lab.data.corpora import corpus
from falcon_lab.data.datamodule import prepare_data
from falcon_lab.errors import FalconLabError
from falcon_lab.model import precision
from falcon_lab.plugins.discovery import load_components
from running import refused, run
from tiny_models import save_tiny

SMALL = ["--tokens=60", "--sampled=1", "--question-tokens=40", "--answer-tokens=20"]
SMALL += ["--batch=4", "--part=8"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_chat_target(tmp_path / "target")
    return tmp_path


def test_it_writes_a_corpus_with_a_card_goes_on_and_trains_its_own_target_alone(
    place: Path,
) -> None:
    (place / "own.jsonl").write_text('{"text": "a b c d e f g"}\n{"text": "d e f g h"}\n')
    held = {"question_id": 1, "turns": ["x d e f g h x"]}
    (place / "held.jsonl").write_text(json.dumps(held) + "\n")
    words = ["dialogues", "--target", "target", "--out", "d.jsonl", *SMALL]
    words += ["--questions", "own.jsonl", "--share=1", "--keep-out", "held.jsonl"]
    printed = run(*words)
    assert "answer tokens" in printed
    assert "held.jsonl (1)" in printed
    assert "1 overlap" not in printed  # "d e f g h" is less than the prompt
    card = json.loads((place / "d.card.json").read_text())
    assert card["answer_tokens"] >= 60
    assert card["target"]["fingerprint"] == chat_target().fingerprint
    assert card["settings"]["dtype"] in ("float32", "bfloat16")
    before = (place / "d.jsonl").read_bytes()
    run(*words)
    assert (place / "d.jsonl").read_bytes() == before
    run(*[word.replace("--tokens=60", "--tokens=120") for word in words])
    assert (place / "d.jsonl").read_bytes().startswith(before)
    assert next(corpus("d.jsonl", split="train")).messages is not None
    with pytest.raises(FalconLabError, match="has written"):
        prepare_data(
            DataConfig(corpus="d.jsonl"),
            chat_target(seed=1),
            drafter={"name": "falcon"},
            components=load_components(),
            announce=print,
        )


def test_a_file_goes_on_in_the_type_it_was_begun_in_on_a_machine_where_another_is_faster(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["dialogues", "--target", "target", "--out", "d.jsonl", *SMALL]
    monkeypatch.setattr(precision, "bfloat16_gain", lambda: 0.5)
    run(*words)
    begun = json.loads((place / "d.card.json").read_text())
    assert begun["settings"]["dtype"] == "float32"
    monkeypatch.setattr(precision, "bfloat16_gain", lambda: 2.0)
    run(*[word.replace("--tokens=60", "--tokens=90") for word in words])
    card = json.loads((place / "d.card.json").read_text())
    assert card["answer_tokens"] >= 90 > begun["answer_tokens"]
    assert card["settings"]["dtype"] == "float32"
    run(*[word.replace("d.jsonl", "new.jsonl") for word in words])
    assert json.loads((place / "new.card.json").read_text())["settings"]["dtype"] == "bfloat16"


def test_a_target_without_a_chat_template_is_told_so_before_anything_is_written(
    place: Path,
) -> None:
    save_tiny(place / "plain")
    assert "no chat template" in refused("dialogues", "--target", "plain", "--out", "d.jsonl")
    assert not (place / "d.jsonl").exists()
