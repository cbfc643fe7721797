"""Lossless verification at any temperature; the rule follows from how the tree was made.

Shapes: N tree nodes, V vocabulary.

Candidates that were chosen deterministically are no samples of anything, so the drafter's
probabilities must not enter their acceptance: doing so is biased (toy total variation 0.28), and
there is no way to ask for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.acceptance.walk import walk
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import Acceptance, BuildContext
from falcon_lab.trees.token_tree import TokenTree


class SamplingRule:
    """Rejection sampling over a tree: the output follows the target's own distribution.

    Args:
        config: the component has no options.
        context: not needed.
    """

    lossless = True

    def __init__(self, config: None, context: BuildContext) -> None:
        del config, context

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """Accept a path of ``tree``, by the rule that its ``proposal`` calls for.

        Raises:
            FalconLabError: a tree says that it was sampled, but carries no distributions.
        """
        if tree.proposal == "deterministic":
            return accept_deterministic(tree, logits, sampling, generator)
        return accept_sampled(tree, logits, sampling, generator)


def accept_deterministic(
    tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> Acceptance:
    """The one-hot rule: try siblings in order, x with probability p[x]; else p[x] = 0, renormalise.

    A sibling is then accepted with p[x] in all, and what is drawn after all of them were refused
    is p without them. That is a draw from p which goes on below the sibling it hits, and is done
    so: a round takes as many draws as tokens, in the order in which plain decoding takes them, so
    that a seed gives both the same text.
    """
    tokens = tree.tokens.tolist()

    def step(node: int, children: list[int]) -> tuple[int | None, int]:
        token = int(sampling.draw(logits[node], generator))
        return next((child for child in children if tokens[child] == token), None), token

    return walk(tree, step)


def accept_sampled(
    tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> Acceptance:
    """Multi-round speculative sampling for siblings drawn from q without replacement.

    Each sibling x is accepted with probability min(1, p[x] / q[x]); else p becomes the normalised
    (p - q)+, and q loses x and is normalised (SpecInfer, arXiv 2305.09781, Algorithm 2; without
    replacement as in EAGLE, arXiv 2401.15077).
    """
    if tree.q is None or tree.q_row is None:
        raise FalconLabError(
            "a tree with proposal 'sampled' must carry q and q_row, the distributions that its "
            "nodes were drawn from; a tree of chosen candidates is 'deterministic'"
        )
    tokens, q_row, rows = tree.tokens.tolist(), tree.q_row.tolist(), tree.q

    def step(node: int, children: list[int]) -> tuple[int | None, int]:
        p = sampling.probabilities(logits[node]).double()
        q = rows[q_row[children[0]]].double() if children else p
        for child in children:
            token = tokens[child]
            chance = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
            if bool(chance * q[token] < p[token]):
                return child, token
            p = residual(p, q)
            q = without(q, token)
        return None, int(torch.multinomial(p, 1, generator=generator))

    return walk(tree, step)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """``[V]``: the normalised (p - q)+; p itself when nothing is left of it but rounding."""
    rest = (p - q).clamp(min=0)
    mass = rest.sum()
    return torch.where(mass > 0, rest / mass, p)


def without(q: Tensor, token: int) -> Tensor:
    """``[V]``: q on the condition that ``token`` is not drawn."""
    rest = q.clone()
    rest[token] = 0
    return rest / rest.sum().clamp(min=torch.finfo(q.dtype).tiny)
