"""The rule that fits the temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.acceptance.greedy import Greedy
from falcon_lab.acceptance.sampling import SamplingRule
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.protocols import Acceptance, BuildContext, PaddedAcceptance
from falcon_lab.trees.token_tree import TokenTree


class Auto:
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
        """``logits`` are the target's, ``[N, V]``, one row per tree node."""
        rule = self._greedy if sampling.greedy else self._sampling
        return rule(tree, logits, sampling, generator)

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """As ``Greedy``; sampling decides step by step."""
        if not sampling.greedy:
            return None
        return self._greedy.accept_padded(tree, logits, sampling, generator)
