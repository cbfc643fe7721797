"""Acceptance rules: which path of a verified tree is kept, and the token that follows it.

Greedy verification accepts the longest path that the target would have written itself. Rejection
sampling is lossless at any temperature, and its rule follows from how the tree was made:
candidates that were chosen deterministically are no samples, so the drafter's probabilities must
not enter their acceptance. Doing so is biased (toy total variation 0.28), and there is no way to
configure it.

Shapes: N tree nodes, V vocabulary, A accepted draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Acceptance, AcceptanceRule, BuildContext, PaddedAcceptance
from falcon_lab.sampling import Sampling, drawn, most_likely
from falcon_lab.tree import CHOSEN, TokenTree

Step = Callable[[int, list[int]], tuple[int | None, int]]
"""Node and its children, in order -> the child that is accepted (or None), and the token that
follows the node: the child's, or the correction."""


def walk(tree: TokenTree, step: Step) -> Acceptance:
    """Follow accepted children from the root until a node has none."""
    children: list[list[int]] = [[] for _ in range(tree.nodes)]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    path = [0]
    while True:
        child, token = step(path[-1], children[path[-1]])
        if child is None:
            device = tree.tokens.device
            return Acceptance(torch.tensor(path, device=device), torch.tensor(token, device=device))
        path.append(child)


class WithoutOptions(AcceptanceRule):
    """Takes no options, and keeps the target's own output.

    Args:
        config: the component has no options.
        context: not needed.
    """

    lossless = True

    def __init__(self, config: None, context: BuildContext) -> None:
        del config, context


class Greedy(WithoutOptions):
    """Accept a node when it is the target's argmax after its parent, and so are its ancestors."""

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """Accept the longest matching path, and the target's argmax after it.

        Raises:
            FalconLabError: the temperature is not 0.
        """
        best, deepest = self._deepest(tree, logits, sampling)
        # A parent comes before its children, so the ancestors are in the order of the path.
        path = tree.ancestors.index_select(0, deepest)[0].nonzero().flatten()
        return Acceptance(path, best.index_select(0, deepest)[0])

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """Decide without waiting for the device, for trees whose shape is known."""
        if tree.routes is None:
            return None
        best, deepest = self._deepest(tree, logits, sampling)
        route = tree.routes.index_select(0, deepest)[0]
        return PaddedAcceptance(route, best.index_select(0, deepest)[0])

    def _deepest(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """Return the target's argmax after every node, ``[N]``, and the last right one, ``[1]``."""
        if not sampling.greedy:
            raise FalconLabError(
                f"acceptance 'greedy' decodes at temperature 0, not {sampling.temperature}; choose "
                "'auto' or 'sampling', or set evaluation.temperature=0"
            )
        best = most_likely(logits)
        # The root's parent is -1, so it is compared with the last node's argmax; it is accepted
        # anyway.
        wrong = tree.tokens != best[tree.parents]
        wrong[0] = False
        refused = (tree.ancestors & wrong).any(-1)
        return best, tree.depth.masked_fill(refused, -1).argmax(0, keepdim=True)


class SamplingRule(WithoutOptions):
    """Rejection sampling over a tree: the output follows the target's own distribution."""

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
    """Apply the one-hot rule: try siblings in order, x with probability p[x]; else remove x from p.

    A sibling is then accepted with p[x] in all, and what is drawn after all of them were refused
    is p without them. That is a draw from p which continues below the sibling it hits, and is done
    so: a round takes as many draws as tokens, in the order in which plain decoding draws them, so
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
    """Apply multi-round speculative sampling to siblings drawn from q without replacement.

    Each sibling x is accepted with probability min(1, p[x] / q[x]); else p becomes the normalised
    (p - q)+, and q loses x and is normalised (SpecInfer, arXiv 2305.09781, Algorithm 2; without
    replacement as in EAGLE, arXiv 2401.15077).

    What was drawn from a further q, or chosen (``"mixed"``), comes after that, with what is left
    of p in the place of p: each q by this rule, and chosen siblings all at once by the one-hot
    rule, a draw which continues below the sibling it hits. Drawn ones come first since for one
    draw x and a chosen set D that accepts most: Σ over D of p and Σ outside of min(p, q) in all,
    where D first leaves Σ outside of min(p, (1 - p[D]) q).
    """
    if tree.q is None or tree.q_row is None:
        raise FalconLabError(
            f"a tree with proposal {tree.proposal!r} must carry q and q_row, the distributions "
            "that its nodes were drawn from; a tree of chosen candidates is 'deterministic'"
        )
    tokens, q_row, rows = tree.tokens.tolist(), tree.q_row.tolist(), tree.q

    def step(node: int, children: list[int]) -> tuple[int | None, int]:
        p = q = sampling.probabilities(logits[node]).double()
        row = token = CHOSEN
        for child in (each for each in children if q_row[each] != CHOSEN):
            if q_row[child] != row:
                row = q_row[child]
                q = rows[row].double()
            else:
                q = without(q, token)
            token = tokens[child]
            chance = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
            if bool(chance * q[token] < p[token]):
                return child, token
            p = residual(p, q)
        token = int(drawn(p, generator))
        chosen = (each for each in children if q_row[each] == CHOSEN and tokens[each] == token)
        return next(chosen, None), token

    return walk(tree, step)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the normalised (p - q)+, ``[V]``; p itself when only rounding is left of it."""
    rest = (p - q).clamp(min=0)
    mass = rest.sum()
    return torch.where(mass > 0, rest / mass, p)


def without(q: Tensor, token: int) -> Tensor:
    """Return q on the condition that ``token`` is not drawn, ``[V]``."""
    rest = q.clone()
    rest[token] = 0
    return rest / rest.sum().clamp(min=torch.finfo(q.dtype).tiny)


class Auto(AcceptanceRule):
    """``Greedy`` at temperature 0, ``SamplingRule`` above.

    Args:
        config: the component has no options.
        context: handed on.
    """

    lossless = True

    def __init__(self, config: None, context: BuildContext) -> None:
        self._greedy = Greedy(config, context)
        self._sampling = SamplingRule(config, context)

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """Accept a path by the rule that fits the temperature."""
        rule = self._greedy if sampling.greedy else self._sampling
        return rule(tree, logits, sampling, generator)

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """Decide as ``Greedy`` does; sampling decides step by step."""
        if not sampling.greedy:
            return None
        return self._greedy.accept_padded(tree, logits, sampling, generator)
