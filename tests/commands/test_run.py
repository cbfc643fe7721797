from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from falcon_lab.cli import main
from falcon_lab.commands.run import mark
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


def test_a_text_is_in_the_loss_from_end_to_end(target: Path) -> None:
    arguments = ["view-data", "generated", f"target.name={target}", "--samples", "2"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("[[") == result.stdout.count("<eos>]]") == 2
    assert result.stderr.count("— ") == 2


def test_a_yaml_says_whose_data_to_show(target: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "notes"
    corpus.mkdir()
    for number in range(6):
        (corpus / f"{number}.txt").write_text("some words of one's own\n" * 40)
    path = tmp_path / "x.yaml"
    settings = {"target": {"name": str(target)}, "data": {"corpus": str(corpus)}}
    path.write_text(json.dumps(settings))
    result = CliRunner().invoke(main, ["view-data", str(path)])
    assert result.exit_code == 0, result.output
    assert "[[some words of one's own\n" in result.stdout
    assert ".txt" in result.stderr


def test_the_loss_is_marked_by_colour_or_brackets() -> None:
    assert mark("a", color=True) == click.style("a", fg="green")
    assert mark("a", color=False) == "[[a]]"


def test_chats_are_shown_by_the_template_that_is_asked_for(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats: 1.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answer"}]
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    arguments = ["view-data", str(file), f"target.name={target}"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "set data.chat_template=plain" in result.stderr
    result = CliRunner().invoke(main, [*arguments, "data.chat_template=plain"])
    assert result.exit_code == 0, result.output
    assert "hello\n" in result.stdout
    assert "[[answer" in result.stdout
