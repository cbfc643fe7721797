from __future__ import annotations

from typing import Any

import pytest
import torch
from space_cases import FAMILIES, FOLDER, drafter, engine, target, tuned
from torch import Tensor

from falcon_lab import testing
from falcon_lab.acceptance import walk
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Acceptance, AcceptanceRule
from falcon_lab.sampling import Sampling
from falcon_lab.testing import fit
from falcon_lab.tree import TokenTree

PROMPTS = [[5], [3, 4, 2, 4, 5, 9]]
TREES: list[dict[str, Any]] = [
    {"name": "chain", "depth": 3},
    {"name": "static", "template": {"": 3, "0": 2, "1": 1, "00": 2}},
]


class Released(AcceptanceRule):
    """What the authors' program does: after a refusal it draws from p, the refused token too."""

    lossless = True

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        tokens = tree.tokens.tolist()

        def step(node: int, children: list[int]) -> tuple[int | None, int]:
            p = sampling.probabilities(logits[node])
            for child in children:
                if torch.rand((), generator=generator) < p[tokens[child]]:
                    return child, tokens[child]
            return None, int(sampling.draw(logits[node], generator))

        return walk(tree, step)


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s_own(family: str, tree: dict[str, Any]) -> None:
    model = target(family)
    rounds = testing.lossless_rounds(engine(model, drafter(model), tree=tree), PROMPTS, 24)
    assert rounds[0].nodes == 0
    assert any(one.nodes for one in rounds)
    assert any(one.auxiliary for one in rounds)


def test_batches_are_lossless() -> None:
    model = target("gemma3")
    plain = [testing.plain_text(model, prompt, 20) for prompt in PROMPTS * 2]
    together = testing.write_together(
        engine(model, drafter(model), tree=TREES[1]), PROMPTS * 2, 20, batch_size=3
    )
    assert [one.tokens for one in together] == plain


def test_sampled_output_follows_the_target_s_distribution() -> None:
    model = testing.tiny_target(vocab=5, layers=3)
    by = engine(model, drafter(model), tree=TREES[1])
    generator = torch.Generator().manual_seed(5)
    assert fit(by, [3, 2, 4], samples=400, generator=generator, temperature=0.9) > 0.01


def test_the_released_rule_is_found_to_be_biased() -> None:
    model = testing.tiny_target(vocab=5, layers=3)
    likeliest = {**TREES[0], "proposal": "deterministic"}
    by = engine(model, drafter(model), tree=likeliest, rule=Released())
    generator = torch.Generator().manual_seed(5)
    assert fit(by, [3, 2, 4], samples=400, generator=generator, temperature=0.9) < 1e-4


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_target_that_has_learnt_to_answer_masks_drafts(weights: str) -> None:
    if weights == "lora":
        pytest.importorskip("peft")
    model, texts = tuned(weights)
    made = drafter(model, mask_token=None, block=None)
    assert made.block == 2
    rounds = testing.lossless_rounds(
        engine(model, made, tree={"name": "chain", "depth": 2}), texts[:, :2].tolist(), 18
    )
    assert testing.accepted(rounds) / len(rounds) > 0.5


def test_a_target_without_a_mask_token_is_refused() -> None:
    with pytest.raises(FalconLabError, match=r"target\.tune\.name=sar_sft"):
        drafter(target(), mask_token=None)
    with pytest.raises(FalconLabError, match="'<nothing>'"):
        drafter(target(), mask_token="<nothing>")
