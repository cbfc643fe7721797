import json
from pathlib import Path

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.measure.records import Answer, Record, RoundColumns, Times, write_answers


def turn(tokens: int, emitted: list[int]) -> Answer:
    rounds = RoundColumns(
        nodes=[4 for _ in emitted],
        depth=[4 for _ in emitted],
        passes=[2 for _ in emitted],
        accepted=[n - 1 for n in emitted],
        emitted=emitted,
    )
    return Answer(5, list(range(tokens)), f"ü{tokens}", "length", Times(wall=0.5), rounds)


def row(prompt: str, *turns: Answer) -> Record:
    return Record("m", prompt, "writing", list(turns), [1.0])


def test_an_answer_is_a_line_in_spec_benchs_format(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write_answers(
        path, "falcon", [row("81", turn(5, [3, 2]), turn(1, [1])), row("x/1", turn(2, [2]))]
    )
    first, second = map(json.loads, path.read_text("utf-8").splitlines())
    assert {key: first[key] for key in ("question_id", "category", "model_id", "choices")} == {
        "question_id": 81,
        "category": "writing",
        "model_id": "falcon",
        "choices": [
            {
                "index": 0,
                "turns": ["ü5", "ü1"],
                "decoding_steps": [2, 1],
                "new_tokens": [5, 1],
                "wall_time": [0.5, 0.5],
                "accept_lengths": [3, 2, 1],
            }
        ],
    }
    assert set(first) == {
        "question_id", "category", "answer_id", "model_id", "choices", "tstamp"
    }  # fmt: skip
    assert second["question_id"] == "x/1"
    assert first["answer_id"] != second["answer_id"]
    assert first["tstamp"] > 1.7e9


def test_plain_decoding_takes_a_step_a_token(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write_answers(path, "plain", [row("1", turn(3, []))])
    [choice] = json.loads(path.read_text())["choices"]
    assert (choice["decoding_steps"], choice["accept_lengths"]) == ([3], [1, 1, 1])


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.jsonl"
    write_answers(path, "falcon", [row("1", turn(1, [1]))])
    before = path.read_bytes()

    def full(self: Path, *_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FalconLabError, match=r"answers\.jsonl: .*No space left on device"):
        write_answers(path, "falcon", [])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl"]
