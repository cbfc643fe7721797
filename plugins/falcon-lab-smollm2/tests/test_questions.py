from __future__ import annotations

import ast
import json
import tomllib
from random import Random

import pytest
from falcon_lab_smollm2.questions import PATTERNS, function, main, questions


def test_questions_are_all_different_and_a_seed_decides_them() -> None:
    found = list(questions(3000))
    assert len(set(found)) == 3000
    assert found[:50] == list(questions(50))
    assert found[:50] != list(questions(50, seed=1))


def test_no_slot_of_a_pattern_is_left_open() -> None:
    assert not [text for text in questions(3000) if "{" in text or "}" in text]


def test_functions_are_python() -> None:
    draw, patterns = Random(0), tomllib.loads(PATTERNS.read_text())["programs"]
    for _ in range(300):
        text = function(draw, patterns)
        start = min(place for place in (text.find("from typing"), text.find("def ")) if place >= 0)
        ast.parse(text[start:].removesuffix("```"))


def test_they_are_printed_as_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    main(["7"])
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == list(questions(7))
