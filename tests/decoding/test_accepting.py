from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.decoding import CONTEXT
from fakes.drafters import RandomDrafter
from fakes.waits import watched
from falcon_lab.acceptance import Auto, SamplingRule
from falcon_lab.decoding.accepting import accept
from falcon_lab.interfaces import Budget, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.trees.paths import checked
from falcon_lab.trees.template_tree import TemplateTree
from falcon_lab.trees.templates import named

VOCAB = 6
SHAPES = [named("k2-8", 2), named("auto", 2), checked([(0,)]), checked([])]


def grown(paths: Any, seed: int, sampling: Sampling) -> Any:
    """A tree of a random drafter, and the target's logits of its nodes: they often agree."""
    builder, drafter = TemplateTree(paths, 2, "sampled"), RandomDrafter(VOCAB, 2, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    frontier = builder.start(RoundContext(torch.tensor(seed % VOCAB), Budget(), sampling, draws))
    while frontier is not None:
        frontier = builder.grow(drafter.draft(frontier))
    tree = builder.finish()
    logits = torch.randn(tree.nodes, VOCAB, generator=draws)
    following = torch.randint(tree.nodes, (tree.nodes,), generator=draws)
    logits[torch.arange(tree.nodes), tree.tokens[following]] += 2
    return tree, logits


@pytest.mark.parametrize(
    "rule", [Auto(None, CONTEXT), SamplingRule(None, CONTEXT)], ids=["auto", "sampling"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_has_what_its_rule_gives_alone(rule: Any, temperature: float, seed: int) -> None:
    sampling = Sampling(temperature=temperature)
    rows = [grown(paths, seed + place, sampling) for place, paths in enumerate(SHAPES)]
    generators = [torch.Generator().manual_seed(seed + place) for place in range(len(rows))]
    found = accept(
        [rule] * len(rows),
        [tree for tree, _ in rows],
        [logits for _, logits in rows],
        [(sampling, generator) for generator in generators],
    )
    for place, ((tree, logits), ours) in enumerate(zip(rows, found, strict=True)):
        alone = rule(tree, logits, sampling, torch.Generator().manual_seed(seed + place))
        expected = [*tree.tokens[alone.path[1:]].tolist(), int(alone.next_token)]
        assert ours.path == ours.nodes.tolist() == alone.path.tolist()
        assert ours.listed == ours.tokens.tolist() == expected


def test_greedy_rows_are_waited_for_together() -> None:
    rows = [grown(paths, 3, Sampling()) for paths in SHAPES]
    with watched() as seen:
        accept(
            [Auto(None, CONTEXT)] * len(rows),
            [tree for tree, _ in rows],
            [logits for _, logits in rows],
            [(Sampling(), torch.Generator())] * len(rows),
        )
    assert seen == ["tolist"]
