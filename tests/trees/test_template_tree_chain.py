from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.drafters import RandomDrafter
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundContext
from falcon_lab.plugins.builtins import ChainConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.template_tree import Chain

HOST: Any = None


def grown(depth: int, block: int, temperature: float = 0.0) -> tuple[Any, int]:
    chain = Chain(ChainConfig(depth=depth), BuildContext(HOST, block))
    drafter = RandomDrafter(9, block)
    drawing = Sampling(temperature), torch.Generator()
    frontier = chain.start(RoundContext(torch.tensor(1), Budget(), *drawing))
    passes = 0
    while frontier is not None:
        frontier = chain.grow(drafter.draft(frontier))
        passes += 1
    return chain.finish(), passes


def test_a_chain_of_depth_zero_is_the_root_alone() -> None:
    tree, passes = grown(0, 2)
    assert tree.tokens.tolist() == [1]
    assert passes == 0


@pytest.mark.parametrize(("depth", "block", "passes"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (3, 4, 1)])
def test_a_chain_takes_as_many_passes_as_it_has_blocks(depth: int, block: int, passes: int) -> None:
    tree, needed = grown(depth, block)
    assert needed == passes
    assert tree.parents.tolist() == [-1, *range(depth)]
    assert torch.equal(tree.ancestors, torch.ones(depth + 1, depth + 1).tril().bool())


@pytest.mark.parametrize(("temperature", "found"), [(0.0, "deterministic"), (1.0, "sampled")])
def test_its_tokens_are_drawn_above_temperature_0_unless_it_is_said(
    temperature: float, found: str
) -> None:
    assert grown(3, 1, temperature)[0].proposal == found


def test_text_that_was_looked_up_is_chosen_at_any_temperature() -> None:
    """To draw from a row that proposes one token alone is to choose it, without q."""
    tree = grown_from([certain(3), certain(5)])
    assert tree.tokens.tolist() == [1, 3, 5]
    assert tree.proposal == "deterministic"
    assert tree.q is None


def test_a_pass_that_is_certain_stands_beside_one_that_is_drawn() -> None:
    drawn = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0))
    tree = grown_from([certain(3), DraftOutput(drawn, all_proposed=True), certain(5)])
    assert tree.proposal == "mixed"
    assert tree.q is not None
    assert tree.q_row is not None
    assert tree.q_row.tolist() == [-1, -1, 0, -1]
    assert torch.allclose(tree.q[0], drawn[0, 0].softmax(-1))


def certain(token: int) -> DraftOutput:
    logits = torch.full((1, 1, 9), -torch.inf)
    logits[..., token] = 0.0
    return DraftOutput(logits)


def grown_from(outputs: list[DraftOutput]) -> Any:
    chain = Chain(ChainConfig(depth=len(outputs)), BuildContext(HOST, 1))
    drawing = Sampling(1.0), torch.Generator()
    chain.start(RoundContext(torch.tensor(1), Budget(), *drawing))
    for output in outputs:
        chain.grow(output)
    return chain.finish()
