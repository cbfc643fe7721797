"""Rounds of different lengths, as the drafter's confidence has it, change no distribution."""

from __future__ import annotations

import pytest
import torch

from fakes.decoding import CONTEXT, chain, generate, plain, speculative
from fakes.drafters import RandomDrafter
from fakes.statistics import chi_square
from fakes.table_target import TableTarget
from falcon_lab.controllers import Confidence
from falcon_lab.plugins.builtins import ConfidenceConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.templates import named

PROMPT = [1, 3, 0, 2]


def _confidence(threshold: float) -> Confidence:
    return Confidence(ConfidenceConfig(threshold=threshold), CONTEXT)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_greedy_output_is_plain_decodings(block: int, threshold: float) -> None:
    target = TableTarget(8, seed=0)
    drafter = RandomDrafter(8, block, seed=3, scale=3.0)
    paths = [*chain(9), *((1, *path) for path in chain(4)), (1,)]
    engine = speculative(target, drafter, paths, controller=_confidence(threshold))
    out = generate(engine, PROMPT, 60)
    assert out.tokens == plain(target, PROMPT, 60).tokens
    assert len({round_.passes for round_ in out.rounds}) >= (2 if threshold < 0.9 else 1)


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_three_sampled_tokens_follow_the_targets_distribution(proposal: str) -> None:
    target, samples = TableTarget(4, seed=1), 1500
    engine = speculative(
        target,
        RandomDrafter(4, 2, scale=2.5),
        named("k2-8", 2),
        proposal=proposal,
        controller=_confidence(0.3),
    )
    generator = torch.Generator().manual_seed(7)
    texts, passes = [], set()
    for _ in range(samples):
        out = generate(engine, PROMPT, 5, generator=generator, temperature=1.0)
        texts.append(out.tokens[:3])
        passes |= {round_.passes for round_ in out.rounds}
    assert {1, 2} <= passes
    law = target.joint(PROMPT, Sampling(temperature=1.0), 3)
    assert chi_square(torch.tensor(texts), law) > 0.01
