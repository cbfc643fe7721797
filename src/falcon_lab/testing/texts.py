"""A text that a tiny target has read, as a drafter is told of it and trained on it.

Shapes: n rows, B sequences, T tokens, L tapped layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.distill.inputs import drafter_inputs
from falcon_lab.interfaces import Drafter, DrafterInputs, Observation
from falcon_lab.model.target import Target


@dataclass(frozen=True, slots=True)
class Text:
    """n + 1 tokens, and what the target made of them.

    Attributes:
        tokens: ``[n + 1]`` long.
        features: ``[n + 1, H]``.
        taps: ``[n + 1, L, H]``, or None.
    """

    tokens: Tensor
    features: Tensor
    taps: Tensor | None

    @classmethod
    def read(cls, target: Target, drafter: Drafter, tokens: Tensor) -> Text:
        """The text of ``[n + 1]`` tokens, as that drafter wants it read."""
        features, taps = read(target.tapped(drafter.taps), one_document(tokens))
        return cls(tokens, features[0], None if taps is None else taps[0])

    def observation(
        self, drafter: Drafter, start: int, stop: int, remaining: int = 0
    ) -> Observation:
        """Rows ``start`` to ``stop`` of it."""
        return Observation(
            self.tokens[start + 1 : stop + 1].clone(),
            self.features[start:stop].clone() if "features" in drafter.needs else None,
            remaining,
            None if self.taps is None else self.taps[start:stop].clone(),
        )


def random_tokens(target: Target, count: int, generator: torch.Generator) -> Tensor:
    """``[count]`` long, none of which ends a text."""
    return torch.randint(1, target.vocab_size, (count,), generator=generator)


def one_document(tokens: Tensor) -> Batch:
    """A batch of ``[T]`` tokens alone."""
    return packed([[tokens]])


def packed(sequences: Sequence[Sequence[Tensor]]) -> Batch:
    """A batch of sequences of documents; all sequences are equally long."""
    lengths = [[len(document) for document in documents] for documents in sequences]
    tokens = torch.stack([torch.cat(list(documents)) for documents in sequences])
    numbers = [torch.cat([torch.full((n,), i) for i, n in enumerate(of_one)]) for of_one in lengths]
    places = [torch.cat([torch.arange(n) for n in of_one]) for of_one in lengths]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, mask, torch.stack(numbers), torch.stack(places), torch.tensor(0))


def read(target: Target, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Features ``[B, T, H]`` of a batch and, of a target that is tapped, ``[B, T, L, H]``."""
    rows = batch.tokens, batch.documents, batch.positions
    if not target.taps:
        return target.teacher(*rows), None
    return target.tapped_teacher(*rows)


def training_inputs(
    target: Target, drafter: Drafter, batch: Batch, generator: torch.Generator
) -> DrafterInputs:
    """What a drafter is trained on, without noise."""
    features, taps = read(target.tapped(drafter.taps), batch)
    return drafter_inputs(batch, features, 0.0, (generator, generator), taps)
