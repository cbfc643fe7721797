"""Multiple-choice accuracy by log-likelihood, against one ending at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.model.target import Target
from falcon_lab.pretraining.accuracy import (
    answers,
    encoded,
    is_right,
    log_likelihoods,
    paired,
    together,
)
from falcon_lab.pretraining.questions import Line, Question, digest_of, read_questions
from tiny_models import tiny_target

LINES = (
    Line("a man opens the door", ["and goes in.", "of a", "then he sits down by the fire"], 0),
    Line("water ", [" boils", "falls from the sky, as rain"], 1),
    Line("one two three", ["four", "five six", "ten", "a dozen of them"], 3),
)
QUESTIONS = [Question(line, f"file:{i}") for i, line in enumerate(LINES, start=1)]


def alone(target: Target, context: str, ending: str) -> float:
    """The log-likelihood of an ending, read by Hugging Face's own model with nothing beside it."""
    start = len(target.tokenizer(context)["input_ids"])
    tokens = torch.tensor(target.tokenizer(f"{context} {ending}")["input_ids"])[None]
    with torch.no_grad():
        scores = target.model(tokens).logits[0, :-1].log_softmax(-1)
    return float(scores.gather(-1, tokens[0, 1:, None])[start - 1 :].sum())


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_every_ending_counts_as_if_it_stood_alone(family: str) -> None:
    target = tiny_target(family)
    found = log_likelihoods(target, encoded(QUESTIONS, target))
    for line, sums in zip(LINES, found, strict=True):
        direct = [alone(target, line.ctx.rstrip(), each.lstrip()) for each in line.endings]
        assert sums == pytest.approx(direct, abs=1e-3)


def test_padding_and_company_change_nothing() -> None:
    target = tiny_target()
    asked = encoded(QUESTIONS, target)
    one_by_one = [log_likelihoods(target, [each])[0] for each in asked]
    for sums, single in zip(log_likelihoods(target, asked), one_by_one, strict=True):
        assert sums == pytest.approx(single, abs=1e-4)
    found = answers(target, QUESTIONS)
    direct = [is_right(each, sums) for each, sums in zip(QUESTIONS, one_by_one, strict=True)]
    assert list(zip(found.acc, found.acc_norm, strict=True)) == direct


def test_a_pass_has_room_for_its_questions_and_each_is_asked_once() -> None:
    asked = encoded(QUESTIONS, tiny_target())
    groups = list(together(asked, tokens=2 * len(asked[0])))
    assert sorted(number for group in groups for number in group) == [0, 1, 2]
    assert max(map(len, groups)) <= 2
    assert len(list(together(asked, tokens=1))) == 3


def test_the_norm_is_for_each_character() -> None:
    question = Question(Line("c", ["ab", "abcdefgh"], 1), "file:1")
    assert is_right(question, [-4.0, -6.0]) == (False, True)
    assert is_right(question, [-4.0, -3.0]) == (True, True)
    assert is_right(question, [-4.0, -20.0]) == (False, False)


def test_a_difference_is_paired() -> None:
    both = [True] * 40 + [False] * 50
    found = paired([*both, *[True] * 8, *[False] * 2], [*both, *[False] * 8, *[True] * 2])
    assert (found.parent, found.tuned) == (0.48, 0.42)
    assert found.difference == pytest.approx(-0.06)
    # Bonett and Price by hand: 3 / 102 and 9 / 102, z = 1.95996
    assert (found.low, found.high) == pytest.approx((-0.124401, 0.006754), abs=1e-5)
    same = paired(both, both)
    assert same.difference == 0
    assert same.low == -same.high < 0


def test_questions_are_spread_over_the_file_and_named_by_what_they_say(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    lines = [{"ctx": f"{i}", "endings": ["a", "b"], "label": i % 2, "ind": i} for i in range(10)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert len(read_questions(file)) == 10
    some = read_questions(file, 4)
    assert [each.line.ctx for each in some] == ["0", "2", "5", "7"]
    assert some[1].source.endswith(":3")
    assert len(read_questions(file, 400)) == 10
    file.rename(tmp_path / "moved.jsonl")
    assert digest_of(read_questions(tmp_path / "moved.jsonl", 4)) == digest_of(some)
    assert digest_of(some) != digest_of(some[:3])


GOOD: dict[str, Any] = {"ctx": "a b", "endings": ["c", "d"], "label": 1}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({**GOOD, "label": "1"}, "label: must be a valid integer"),
        ({**GOOD, "label": 2}, "label: 2"),
        ({**GOOD, "label": -1}, "label: -1"),
        ({**GOOD, "endings": ["c"]}, "endings: .*at least 2"),
        ({**GOOD, "endings": ["c", 3]}, r"endings\.1"),
        ({**GOOD, "endings": ["c", " "]}, r"endings\.1.*empty"),
        ({**GOOD, "ctx": "\n"}, "ctx: .*empty"),
        ({"endings": ["c", "d"], "label": 1}, "ctx"),
    ],
)
def test_a_line_that_is_no_question_is_named(
    line: dict[str, Any], what: str, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps(line)}\n", encoding="utf-8")
    with pytest.raises(FalconLabError, match=rf"questions\.jsonl:2: .*{what}"):
        read_questions(file)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(FalconLabError, match=r"empty\.jsonl"):
        read_questions(tmp_path / "empty.jsonl")
    with pytest.raises(FalconLabError, match=r"none\.jsonl"):
        read_questions(tmp_path / "none.jsonl")


def test_a_question_that_the_target_cannot_read_is_named() -> None:
    long = Question(Line("a" * 4000, ["b", "c"], 0), "file:7")
    with pytest.raises(FalconLabError, match=r"file:7.*tokens"):
        encoded([long], tiny_target())
