"""Decoding as fast as it would be if so many drafts were accepted: an assumption, not a finding.

The loop does all its work: it drafts, verifies, decides, commits. Only the decision is replaced by
a prescribed one, so that the text is no text. What it shows is the cost of a round, and what each
acceptance would make of it.

Shapes: V vocabulary, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from falcon_lab.acceptance import Greedy
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Acceptance, BuildContext, DrafterHost, PaddedAcceptance
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree
from falcon_lab.trees.paths import Path


class Assumed(Greedy):
    """Accepts a prescribed number of drafts along the first candidates, after deciding as usual.

    Args:
        paths: of the template, as ``TemplateTree`` keeps them.
        accepted: mean draft tokens of a round; where it is no whole number, rounds differ by one.
        host: the target.

    Raises:
        FalconLabError: the tree is not as deep.
    """

    lossless = False

    def __init__(self, paths: Sequence[Path], accepted: float, host: DrafterHost) -> None:
        super().__init__(None, BuildContext(host))
        nodes = {path: node for node, path in enumerate(((), *paths))}
        height = max((len(path) for path in paths), default=0)
        if not 0 <= accepted <= height:
            raise FalconLabError(f"{accepted} drafts a round cannot be accepted of depth {height}")
        self._first = [nodes[(0,) * depth] for depth in range(height + 1)]
        self._accepted = accepted
        self._due = 0.0

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """The target's choice after the last node that it would have accepted, behind the
        prescribed path."""
        decided = super().accept_padded(tree, logits, sampling, generator)
        if decided is None or tree.routes is None:
            return None
        self._due += self._accepted
        depth = min(int(self._due + 1e-6), tree.max_depth)
        self._due -= depth
        return PaddedAcceptance(tree.routes[self._first[depth]], decided.next_token)

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """Refuse: what is prescribed is about the template's own nodes.

        Raises:
            FalconLabError: always.
        """
        raise FalconLabError("an assumed acceptance needs a tree of a template, with all its nodes")
