"""Acceptance rules that are wrong on purpose: the tests must see that they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from falcon_lab.acceptance import accept_sampled, walk
from falcon_lab.interfaces import Acceptance
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree


def soft_q(
    tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> Acceptance:
    """Accepts chosen candidates as if they had been sampled from the drafter's probabilities.

    The rest of a row's mass is spread evenly: the tree does not carry it.
    """
    vocab, rows = logits.shape[-1], tree.parents.clone()
    q = torch.zeros(tree.nodes, vocab)
    q[rows[1:], tree.tokens[1:]] = tree.log_q[1:].exp()
    q += (q == 0) * ((1 - q.sum(-1)) / (q == 0).sum(-1).clamp(min=1))[:, None]
    claimed = replace(tree, proposal="sampled", q=q, q_row=rows)
    return accept_sampled(claimed, logits, sampling, generator)


def resample_from_p(
    tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> Acceptance:
    """Accepts x with probability p[x], but then draws from p with x still in it."""
    tokens = tree.tokens.tolist()

    def step(node: int, children: list[int]) -> tuple[int | None, int]:
        p = sampling.probabilities(logits[node])
        for child in children:
            if float(torch.rand((), generator=generator)) < float(p[tokens[child]]):
                return child, tokens[child]
        return None, int(torch.multinomial(p, 1, generator=generator))

    return walk(tree, step)
