"""Greedy verification: the longest path that the target would have written itself.

Shapes: N tree nodes, V vocabulary, A accepted draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.decoding.sampling import Sampling
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import Acceptance, BuildContext, PaddedAcceptance
from falcon_lab.trees.token_tree import TokenTree


class Greedy:
    """Accept a node when it is the target's argmax after its parent, and so are its ancestors.

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
        """The longest matching path, and the target's argmax after it.

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
        """The same without waiting for the device, for trees whose shape is known."""
        if tree.routes is None:
            return None
        best, deepest = self._deepest(tree, logits, sampling)
        route = tree.routes.index_select(0, deepest)[0]
        return PaddedAcceptance(route, best.index_select(0, deepest)[0])

    def _deepest(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """The target's choice after every node, ``[N]``, and the last accepted node, ``[1]``."""
        if not sampling.greedy:
            raise FalconLabError(
                f"acceptance 'greedy' decodes at temperature 0, not {sampling.temperature}; choose "
                "'auto' or 'sampling', or set evaluation.temperature=0"
            )
        best = logits.argmax(-1)
        # The root's parent is -1, so it looks at the last node's argmax; it is right anyway.
        wrong = tree.tokens != best[tree.parents]
        wrong[0] = False
        refused = (tree.ancestors & wrong).any(-1)
        return best, tree.depth.masked_fill(refused, -1).argmax(0, keepdim=True)
