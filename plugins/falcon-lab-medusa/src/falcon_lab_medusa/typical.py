"""Typical acceptance (Medusa, arXiv 2401.10774, §2.3.1): accept what is likely enough.

Shapes: N tree nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.acceptance import Greedy
from falcon_lab.interfaces import Acceptance, AcceptanceRule, BuildContext, PaddedAcceptance
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree
from falcon_lab_medusa import TypicalConfig


class Typical(AcceptanceRule):
    """Accept x after its parent when p(x) > min(epsilon, alpha·exp(-H(p))), and so its ancestors.

    Of the accepted paths the longest is kept, of those the likeliest. What follows it is drawn from
    the target, so that the first token of every round is the target's own. The output does not
    follow the target's distribution: the rule is lossy. At temperature 0 p has all its mass on one
    token, and only the exact match is left.

    Args:
        config: the two thresholds.
        context: of the builder.
    """

    lossless = False

    def __init__(self, config: TypicalConfig, context: BuildContext) -> None:
        self.config = config
        self._greedy = Greedy(None, context)

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """Choose a path by the target's ``logits``, ``[N, V]``."""
        if sampling.greedy:
            return self._greedy(tree, logits, sampling, generator)
        likely = self.likelihoods(tree, logits, sampling)  # [N]
        refused = (tree.ancestors & likely.isneginf()).any(-1)
        depth = tree.depth.masked_fill(refused, -1)
        # Along the path: the likelihood is that of all its draft tokens.
        along = torch.where(tree.ancestors, likely, 0.0).sum(-1)
        last = along.masked_fill(depth < depth.max(), -torch.inf).argmax()
        path = tree.ancestors[last].nonzero().flatten()
        return Acceptance(path, sampling.draw(logits[last], generator))

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """Decide as ``Greedy`` does; above temperature 0 the host searches for the path."""
        if not sampling.greedy:
            return None
        return self._greedy.accept_padded(tree, logits, sampling, generator)

    def likelihoods(self, tree: TokenTree, logits: Tensor, sampling: Sampling) -> Tensor:
        """Return ``[N]``, log p of each node after its parent, ``-inf`` where it is not typical.

        The root has 0: it is the target's own.
        """
        p = sampling.probabilities(logits)[tree.parents]  # the root's parent is -1; not used
        entropy = torch.special.entr(p).sum(-1)
        bar = (self.config.alpha * (-entropy).exp()).clamp_max(self.config.epsilon)
        own = p.gather(-1, tree.tokens[:, None]).squeeze(-1)
        likely = own.log().where(own > bar, -torch.inf)
        likely[0] = 0.0
        return likely
