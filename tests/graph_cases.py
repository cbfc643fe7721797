"""What the tests of graphs share, on a CPU and on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from falcon_lab.model.graphs import GraphPass
from falcon_lab.model.target import Target
from falcon_lab.tree import TokenTree, ancestor_matrix

ATOL = 2e-5
STEP = 8
"""Keys between graphs here, so that short texts go through several."""


def graphed(target: Target, recorder: Any, said: list[str] | None = None) -> Target:
    """The target with graphs of small steps."""
    announce = ([] if said is None else said).append
    return target.with_passes(partial(GraphPass, announce=announce, recorder=recorder, step=STEP))


def tree_of(parents: list[int], seed: int = 0, vocab: int = 60) -> TokenTree:
    drawn = torch.Generator().manual_seed(seed)
    number = torch.tensor(parents)
    ancestors = ancestor_matrix(number)
    return TokenTree(
        tokens=torch.randint(1, vocab, number.shape, generator=drawn),
        parents=number,
        depth=ancestors.sum(-1) - 1,
        ancestors=ancestors,
        proposal="deterministic",
        log_q=torch.zeros(len(parents)),
    )


def moved(tree: TokenTree, device: torch.device) -> TokenTree:
    """The tree on another device."""
    parts = (tree.tokens, tree.parents, tree.depth, tree.ancestors)
    where = [part.to(device) for part in parts]
    return TokenTree(*where, proposal=tree.proposal, log_q=tree.log_q.to(device))


TREES = ([-1, 0, 0, 2, 1], [-1, 0, 1], [-1, 0, 0, 0, 1, 4, 5, 2, 3, 6, 0], [-1])
PATHS = ([0, 2, 3], [0, 1, 2], [0, 1, 4, 5, 6, 9], [0])


@torch.inference_mode()
def text(target: Target, prompt: int, seed: int = 0, rounds: int = 8) -> Tensor:
    """Logits and features of a text read in steps and trees, of which paths are kept."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 60, (prompt,), generator=drawn).to(target.device)
    cache = target.new_cache(prompt + 8 * rounds + 12)
    target.prefill(tokens, cache)
    found = []
    for round_ in range(rounds):
        start, which = cache.length, round_ % len(TREES)
        output = target.verify(moved(tree_of(TREES[which], round_), target.device), cache)
        cache.commit([start], [PATHS[which]])
        found.append(torch.cat([output.features, output.logits], -1).flatten())
    return torch.cat(found)
