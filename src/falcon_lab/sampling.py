"""How tokens are drawn from the target: temperature, top-k and top-p.

Shapes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.fields import MASSES, TEMPERATURES


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if problem := TEMPERATURES.refusal(self.temperature):
            raise ValueError(f"temperature {problem}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if problem := MASSES.refusal(self.top_p):
            raise ValueError(f"top_p {problem}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[..., V]`` logits -> ``[..., V]`` probabilities in float32, after all the filters.

        Greedy gives all mass to the first of the most likely tokens.
        """
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
        logits = logits.float() / self.temperature
        if self.top_k:
            floor = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < floor, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays when the mass before it has not reached p yet: the first always does.
            outside = (ordered.cumsum(-1) - ordered) >= self.top_p
            kept = ordered.masked_fill(outside, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, kept)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a token from each of ``[..., V]`` logits: ``[...]`` long."""
        if self.greedy:
            return most_likely(logits)
        return drawn(self.probabilities(logits), generator)


def drawn(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each of ``[..., V]`` probabilities: ``[...]`` long.

    On a CPU one uniform number a distribution is looked up in its cumulative sum, which takes
    0.1 ms for 49,152 tokens; ``torch.multinomial`` draws a number for every token, in 1.3 ms. The
    sum is in float64, in which neither an unlikely token is lost nor an impossible one drawn.
    """
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    if rows.device.type != "cpu":
        found = torch.multinomial(rows, 1, generator=generator)
    else:
        places = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        # Row by row, which stays in a core's cache: four times as fast as all at once.
        found = torch.cat([_at(place, row) for place, row in zip(places, rows, strict=True)])
    return found.reshape(probabilities.shape[:-1])


def _at(place: Tensor, probabilities: Tensor) -> Tensor:
    """Return ``[1]``, the first token up to which more than a share ``place`` of the mass lies."""
    mass = probabilities.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(mass, (place * mass[-1]).unsqueeze(0), right=True)


BLOCK = 256
"""Logits of which the greatest is found first."""


def most_likely(logits: Tensor) -> Tensor:
    """Return ``[...]`` long, the first of the most likely tokens of ``[..., V]`` logits.

    On a CPU the greatest of each block of logits comes first, as a maximum without its place is
    found several times as fast as one with it: 22 µs a row of 49,152 in float32 and in bfloat16,
    where ``argmax`` takes 88 and 210 (a Xeon with AVX-512, one thread).
    """
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size < BLOCK * 16:
        return logits.argmax(-1)
    whole = size - size % BLOCK
    blocks = logits[..., :whole].unflatten(-1, (-1, BLOCK))
    greatest = blocks.amax(-1)
    number = greatest.argmax(-1, keepdim=True)
    block = blocks.take_along_dim(number.unsqueeze(-1), dim=-2).squeeze(-2)
    found = number.squeeze(-1) * BLOCK + block.argmax(-1)
    if whole == size:
        return found
    rest = logits[..., whole:]
    better = rest.amax(-1) > greatest.take_along_dim(number, dim=-1).squeeze(-1)
    return torch.where(better, whole + rest.argmax(-1), found)
