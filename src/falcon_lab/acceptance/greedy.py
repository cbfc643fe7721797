"""Greedy verification: the longest path that the target would have written itself.

Shapes: N tree nodes, V vocabulary, A accepted draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.decoding.sampling import Sampling
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import Acceptance, BuildContext
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
        if not sampling.greedy:
            raise FalconLabError(
                f"acceptance 'greedy' decodes at temperature 0, not {sampling.temperature}; choose "
                "'auto' or 'sampling', or set evaluation.temperature=0"
            )
        best = logits.argmax(-1)
        # The root's parent is -1, so it looks at the last node's argmax; it is right anyway.
        wrong = tree.tokens != best[tree.parents]
        wrong[0] = False
        accepted = ~(tree.ancestors & wrong).any(-1)
        deepest = tree.depth.masked_fill(~accepted, -1).argmax()
        # A parent comes before its children, so the ancestors are in the order of the path.
        return Acceptance(tree.ancestors[deepest].nonzero().flatten(), best[deepest])
