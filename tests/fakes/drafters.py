"""Drafters without weights, of any block size.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.interfaces import Drafter, DraftOutput, Frontier, Observation


class RandomDrafter(Drafter):
    """Drafts at random. Checks what it observes."""

    needs = frozenset({"features"})

    def __init__(self, vocab: int, block: int, *, seed: int = 0, scale: float = 1.5) -> None:
        self.block = block
        self.vocab = vocab
        self.scale = scale
        self.generator = torch.Generator().manual_seed(seed)
        self.text: list[int] = []
        self.passes = 0

    def reset(self, first: Tensor) -> None:
        assert first.shape == ()
        self.text = [int(first)]

    def observe(self, observation: Observation) -> None:
        assert observation.features is not None
        assert observation.features.shape[0] == observation.tokens.shape[0]
        self.text += observation.tokens.tolist()

    def draft(self, frontier: Frontier) -> DraftOutput:
        root = frontier.tokens.shape[1] == 0
        assert root == (frontier.parents.tolist() == [-1])
        self.passes = 0 if root else self.passes + 1
        return DraftOutput(self.logits(frontier.tokens.shape[0]))

    def logits(self, blocks: int) -> Tensor:
        shape = (blocks, self.block, self.vocab)
        return self.scale * torch.randn(shape, generator=self.generator)


class TableDrafter(RandomDrafter):
    """Also checks the features of a ``TableTarget``: token and position of every row."""

    def observe(self, observation: Observation) -> None:
        assert observation.features is not None
        first = len(self.text) - 1  # the newest token known; the target has read it by now
        super().observe(observation)
        expected = [[self.text[at], at] for at in range(first, len(self.text) - 1)]
        assert observation.features.tolist() == expected


class OracleDrafter(RandomDrafter):
    """Knows the text to come, and hides the right token among its first candidates."""

    def __init__(
        self, vocab: int, block: int, truth: list[int], *, seed: int = 0, right: float = 0.9
    ) -> None:
        super().__init__(vocab, block, seed=seed)
        self.truth = truth
        self.right = right

    def logits(self, blocks: int) -> Tensor:
        logits = super().logits(blocks)
        for row in range(self.block):
            place = len(self.text) + self.passes * self.block + row
            chance, rank = torch.rand(2, generator=self.generator).tolist()
            if place < len(self.truth) and chance < self.right:
                level = logits[:, row].topk(4).values[:, int(3 * rank**2)]
                logits[:, row, self.truth[place]] = level + 1e-3
        return logits


class SilentDrafter(RandomDrafter):
    """Proposes nothing."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        return DraftOutput(torch.zeros(frontier.tokens.shape[0], 0, self.vocab))


class TrainedAlone(Drafter):
    """Mixed into a module for a test of training: it never drafts."""

    block = 1
    needs = frozenset({"features"})

    def reset(self, first: Tensor) -> None:
        raise NotImplementedError

    def observe(self, observation: Observation) -> None:
        raise NotImplementedError

    def draft(self, frontier: Frontier) -> DraftOutput:
        raise NotImplementedError
