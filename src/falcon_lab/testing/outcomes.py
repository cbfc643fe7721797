"""Targets that are tables, for rounds without a model: what an acceptance rule makes of a tree.

Shapes: N tree nodes, S samples, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.interfaces import Acceptance
from falcon_lab.sampling import Sampling
from falcon_lab.testing.statistics import UNLIKELY, chi_square
from falcon_lab.testing.subject import Subject
from falcon_lab.tree import TokenTree


class TokenTable:
    """A target whose next token depends on the last one alone.

    Args:
        vocabulary: V.
        generator: of the table.
    """

    def __init__(self, vocabulary: int, generator: torch.Generator) -> None:
        self.table = 1.5 * torch.randn(vocabulary, vocabulary, generator=generator)

    def logits(self, tree: TokenTree) -> Tensor:
        """``[N, V]``: after every node."""
        return self.table[tree.tokens]

    def exact(self, root: int, sampling: Sampling) -> Tensor:
        """``[V, V]``: the distribution of the two tokens after the root."""
        p = sampling.probabilities(self.table.double()).double()
        return p[root][:, None] * p

    def text(
        self, tree: TokenTree, found: Acceptance, sampling: Sampling, generator: torch.Generator
    ) -> list[int]:
        """The two tokens after the root, of a round and, if need be, drawn after it."""
        tokens = [*tree.tokens[found.path[1:]].tolist(), int(found.next_token)]
        if len(tokens) < 2:
            tokens.append(int(sampling.draw(self.table[tokens[-1]], generator)))
        return tokens[:2]


def expect_distribution(
    subject: Subject, what: str, texts: Tensor, exact: Tensor, fix: str
) -> None:
    """``[S, d]`` tokens follow the exact distribution ``[V] * d``."""
    chance = chi_square(texts, exact)
    found = torch.zeros_like(exact)
    found.index_put_(tuple(texts.T), torch.ones(len(texts)).to(exact), accumulate=True)
    distance = float((found / len(texts) - exact).abs().sum() / 2)
    subject.expect(
        chance > UNLIKELY,
        f"the distribution of {what}",
        expected="the target's own",
        found=f"a total variation of {distance:.3f} over {len(texts)} samples, which chance has "
        f"with a probability of {chance:.1g}",
        fix=fix,
    )
