from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from falcon_lab.cli import main
from falcon_lab.decoding.rounding import EXACT
from falcon_lab.interfaces import Acceptance
from tiny_models import save_tiny

PROMPTS = "evaluation.prompts.texts=['abc', 'de f', 'gh']"
SMALL = ["--prompts=2", "--samples=60", "--max-new-tokens=8", PROMPTS]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), vocab=32)


def call(target: Path, *overrides: str) -> Result:
    return CliRunner().invoke(main, ["check", "--target", str(target), *SMALL, *overrides])


def test_a_drafter_whose_guesses_are_verified_is_lossless(target: Path) -> None:
    result = call(target, "drafter.name=falcon", "tree.depth=2")
    assert result.exit_code == 0, result.output
    assert "greedy output is identical" in result.stdout
    assert "over 2 prompts" in result.stdout
    assert "60 samples a prompt" in result.stdout


def test_a_rule_that_accepts_everything_is_found_out(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import falcon_lab.acceptance

    class AcceptsEverything:
        lossless = True  # so it claims

        def __init__(self, config: object, context: object) -> None:
            pass

        def __call__(self, tree: Any, logits: Any, sampling: Any, generator: Any) -> Acceptance:
            path = tree.ancestors[-1].nonzero().flatten()
            return Acceptance(path, sampling.draw(logits[path[-1]], generator))

    monkeypatch.setattr(falcon_lab.acceptance, "Auto", AcceptsEverything)
    result = call(target, "drafter.name=falcon", "tree.depth=2")
    assert result.exit_code == 1
    assert "greedy output differs on " in result.stdout
    assert "OUTSIDE the noise" in result.stdout


def test_a_rule_that_calls_itself_lossy_is_not_called_lossless_whatever_it_wrote(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from falcon_lab.acceptance import Auto

    monkeypatch.setattr(Auto, "lossless", False)
    result = call(target, "drafter.name=falcon", "tree.depth=2")
    assert "greedy output is identical" in result.stdout
    assert "NOT lossless: acceptance rule 'auto' is lossy by its own word" in result.stdout
    assert result.exit_code == 1


def test_without_a_drafter_there_is_nothing_to_check(target: Path) -> None:
    result = call(target)
    assert result.exit_code == 2
    assert "name the drafter to check: --drafter DIR or drafter.name=NAME" in result.stderr


def test_types_in_which_kernels_agree_are_the_exact_ones() -> None:
    assert torch.float32 in EXACT
    assert torch.bfloat16 not in EXACT
