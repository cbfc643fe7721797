from __future__ import annotations

import json
from pathlib import Path

import pytest

from falcon_lab.config.schema import Gate
from falcon_lab.pretraining.quality import (
    HeldOutLoss,
    Quality,
    complete_part,
    distinct_share,
    gate_sentence,
    judge,
    parses,
    read_loss,
    read_quality,
)


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3, 4], 1.0), ([1, 1, 1, 1], 0.25), ([], 1.0)]
)
def test_distinct_tokens_are_counted_as_a_share(tokens: list[int], share: float) -> None:
    assert distinct_share(tokens) == share


@pytest.mark.parametrize(
    ("completion", "finished", "expected"),
    [
        ("return 1\n\nx = (", True, "def f():\n    return 1\n\nx = ("),
        ("return 1\n\nx = 2\ny = (", False, "def f():\n    return 1\n\nx = 2"),
        ("return [\n1,\n]\n", False, "def f():\n    return ["),
        ("return 1", False, None),  # the whole function may be unfinished
        ("return (\n        1\n)\n", False, None),  # a closing bracket starts nothing
    ],
)
def test_what_a_length_limit_cut_is_dropped(
    completion: str, finished: bool, expected: str | None
) -> None:
    assert complete_part("def f():\n    ", completion, finished=finished) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [("x = 1\n", True), ("x = (", False), ("a\0b", False), (None, False)],
)
def test_only_what_python_reads_parses(source: str | None, expected: bool) -> None:
    assert parses(source) is expected


def test_a_target_that_reaches_the_gate_passes_with_its_figures() -> None:
    gate = Gate(parse=0.75, distinct=0.3)
    quality = judge(gate, loss=0.5, parsed=[True, True, True, False], distinct=[0.2, 0.4, 0.3, 0.3])
    assert quality.passed
    assert (quality.parse, quality.completions) == (0.75, 4)
    assert quality.distinct == pytest.approx(0.3)
    assert quality.sentence == (
        "it passes its quality gate: loss 0.500 nats/token, 0.75 parse, 0.30 distinct"
    )
    assert gate_sentence(quality.as_dict()) == quality.sentence


@pytest.mark.parametrize(
    ("parsed", "distinct", "missed"),
    [
        ([True, False], [0.5, 0.5], ["0.50 of its completions parse (gate 0.9)"]),
        ([True, True], [0.1, 0.1], ["0.10 of its tokens are distinct (gate 0.3)"]),
        ([False], [0.1], ["0.00 of its completions parse", "0.10 of its tokens are distinct"]),
    ],
)
def test_a_target_that_misses_the_gate_says_by_how_much(
    parsed: list[bool], distinct: list[float], missed: list[str]
) -> None:
    quality = judge(Gate(), loss=1.0, parsed=parsed, distinct=distinct)
    assert not quality.passed
    assert quality.sentence.startswith("it fails its quality gate: only ")
    assert all(text in quality.sentence for text in missed)
    assert quality.verdict.count("only") == len(missed)


@pytest.mark.parametrize(
    "content", [None, "", '{"loss": 1', "[1]", "\udcff", "{}", '{"loss": 1.5, "passed": null}']
)
def test_damaged_figures_are_no_figures(content: str | None, tmp_path: Path) -> None:
    for path in (tmp_path / "quality.json", tmp_path / "loss.json"):
        if content is not None:
            path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert read_quality(tmp_path) is None
    assert read_loss(tmp_path) is None


def test_whole_figures_are_read(tmp_path: Path) -> None:
    figures = Quality(1.5, 0.5, 0.5, 2, True, "well")
    (tmp_path / "quality.json").write_text(json.dumps(figures.as_dict()))
    (tmp_path / "loss.json").write_text('{"nats_per_token": 1.5}')
    assert read_quality(tmp_path) == figures
    assert read_loss(tmp_path) == HeldOutLoss(1.5)
