from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import CONTEXT
from fakes.trees import prefix_closed
from falcon_lab.acceptance import Greedy, SamplingRule
from falcon_lab.errors import FalconLabError
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import Path

GREEDY = Greedy(None, CONTEXT)
SAMPLING = SamplingRule(None, CONTEXT)


def tree_of(paths: list[Path], seed: int, vocab: int) -> tuple[TokenTree, torch.Tensor]:
    """Random tokens, siblings different, and target logits that some of them match."""
    generator = torch.Generator().manual_seed(seed)
    layout = build_layout(paths, 1)
    order = torch.rand(len(layout.paths), vocab, generator=generator).argsort(-1)
    tokens = [0] + [int(order[layout.parents[n], p[-1]]) for n, p in enumerate(layout.paths) if p]
    tree = TokenTree(
        torch.tensor(tokens),
        layout.parents,
        layout.depth,
        layout.ancestors,
        "deterministic",
        torch.zeros(len(tokens)),
        routes=layout.routes,
    )
    return tree, torch.randn(len(tokens), vocab, generator=generator)


@given(prefix_closed(), st.integers(0, 999), st.integers(0, 4))
def test_it_follows_the_targets_argmax_as_far_as_the_tree_goes(
    paths: list[Path], seed: int, spare: int
) -> None:
    vocab = 2 + spare + max((path[-1] for path in paths), default=0)
    tree, logits = tree_of(paths, seed, vocab)
    accepted = GREEDY(tree, logits, Sampling(), torch.Generator())
    path = [0]
    while True:
        best = int(logits[path[-1]].argmax())
        below = [n for n in range(tree.nodes) if tree.parents[n] == path[-1]]
        matching = [node for node in below if tree.tokens[node] == best]
        if not matching:
            break
        path += matching
    assert accepted.path.tolist() == path
    assert accepted.next_token.shape == ()
    assert int(accepted.next_token) == best
    padded = GREEDY.accept_padded(tree, logits, Sampling(), torch.Generator())
    assert padded is not None
    assert padded.path.tolist() == path + path[-1:] * (tree.max_depth + 1 - len(path))
    assert int(padded.next_token) == best
    same = SAMPLING(tree, logits, Sampling(), torch.Generator())
    assert same.path.tolist() == path
    assert int(same.next_token) == best


def test_it_is_refused_at_a_temperature() -> None:
    tree, logits = tree_of([(0,)], 0, 3)
    with pytest.raises(FalconLabError, match=r"temperature 0, not 0\.7"):
        GREEDY(tree, logits, Sampling(temperature=0.7), torch.Generator())
