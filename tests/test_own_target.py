"""A model, texts and chats of one's own, from folders and files to a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from running import SHORTEST, SMOKE, products, refused, run
from tiny_models import save_tiny

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def settings(model: Path, corpus: Path, out: Path) -> list[str]:
    return [
        *SHORTEST,
        "target.pretraining=null",
        f"target.name={model}",
        f"data.corpus={corpus}",
        "data.length=64",
        "data.validation=2",
        "evaluation.prompts.prompt_tokens=16",
        f"out={out}",
    ]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_folder_with_a_model_and_a_folder_of_texts_run_to_their_report(
    family: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model", family)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        lines = [f"line {number} of {other} is here" for other in range(20)]
        (texts / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    own = 'evaluation.prompts.texts=["once upon", "def add"]'
    chosen = [*settings(model, texts, tmp_path / "out"), own, "evaluation.prompts.limit=2"]
    run("run", SMOKE, *chosen)
    results = products(tmp_path / "out", ["chain", "tree"])
    assert {row["prompt"] for row in results["rows"]} == {"text/1", "text/2"}
    assert results["target"]["quality"] is None
    # What was saved works by itself too: the folder knows its target.
    run(
        "evaluate", tmp_path / "out" / "drafter", "evaluation.max_new_tokens=4", f"out={tmp_path}/e"
    )
    run(
        "generate",
        "--drafter",
        tmp_path / "out" / "drafter",
        "--prompt",
        "line",
        "--max-new-tokens=4",
    )


@pytest.fixture
def chatting(tmp_path: Path) -> list[str]:
    """Settings for a chat model, chats and questions of two turns."""
    model = save_tiny(tmp_path / "model", "llama", vocab=96)
    template = model / "chat_template.jinja"
    template.write_text(CHATML, encoding="utf-8")
    chats = [
        {
            "id": f"chat-{number}",
            "messages": [
                {"role": "user", "content": f"what is {number} and {number + 1}?"},
                {"role": "assistant", "content": f"it is {2 * number + 1}, i think."},
            ],
        }
        for number in range(30)
    ]
    write_lines(tmp_path / "chats.jsonl", chats)
    questions = [
        {"question_id": number, "category": "sums", "turns": ["what is 1 and 2?", "and 3?"]}
        for number in (81, 82)
    ]
    write_lines(tmp_path / "questions.jsonl", questions)
    return [
        *settings(model, tmp_path / "chats.jsonl", tmp_path / "out"),
        f"evaluation.prompts.name={tmp_path / 'questions.jsonl'}",
        "evaluation.prompts.limit=2",
    ]


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_chats_and_questions_of_two_turns_run_to_their_report(
    chatting: list[str], tmp_path: Path
) -> None:
    run("run", SMOKE, *chatting)
    results = products(tmp_path / "out", ["chain", "tree"])
    assert {row["prompt"] for row in results["rows"]} == {"81", "82"}
    assert all(len(row["turns"]) == 2 for row in results["rows"])
    line = (tmp_path / "out" / "answers" / "tree.jsonl").read_text(encoding="utf-8").split("\n")[0]
    answer = json.loads(line)
    assert answer["question_id"] in (81, "81")
    assert len(answer["choices"][0]["turns"]) == 2


def test_a_broken_line_of_a_chat_corpus_is_named_and_the_run_goes_on_when_mended(
    chatting: list[str], tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    whole = chats.read_text(encoding="utf-8")
    chats.write_text(whole.replace('"messages"', '"mess', 1), encoding="utf-8")
    assert f"{chats}:1" in refused("run", SMOKE, *chatting)
    chats.write_text(whole, encoding="utf-8")
    run("run", SMOKE, *chatting, "stages=[target,data]")


def test_chats_need_a_template(chatting: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert "template" in refused("run", SMOKE, *chatting)
