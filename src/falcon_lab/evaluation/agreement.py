"""Did a method write what plain decoding wrote, and if not, how close was it?

Shapes: P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from falcon_lab.evaluation.conversation import EncodedPrompt
from falcon_lab.evaluation.rows import PromptRow

NextLogits = Callable[[Tensor], Tensor]
"""The target's logits for what follows a sequence: ``[P]`` long -> ``[V]``."""


def held_against(
    plain: PromptRow, row: PromptRow, prompt: EncodedPrompt, logits: NextLogits | None
) -> PromptRow:
    """The row with its agreement with plain decoding filled in.

    Args:
        plain: plain decoding's row of the same prompt.
        row: the method's.
        prompt: of both.
        logits: for the margin at the first difference; None leaves it out.
    """
    for turn, (expected, got) in enumerate(zip(plain.turns, row.turns, strict=True)):
        place = first_difference(expected.tokens, got.tokens)
        if place is not None:
            margin = None
            if logits is not None:
                read = prompt.tokens([t.tokens for t in plain.turns[:turn]])
                margin = _margin(logits, read, expected.tokens, got.tokens, place)
            return replace(
                row,
                identical=False,
                difference_turn=turn,
                difference_position=place,
                margin=margin,
            )
    return replace(row, identical=True)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Where two answers part: the shorter one's length if one begins the other, None if equal."""
    for place, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _margin(
    logits: NextLogits, read: Tensor, expected: list[int], got: list[int], place: int
) -> float:
    prefix = read.new_tensor(expected[:place])
    scores = logits(torch.cat([read, prefix])).float()  # [V]
    if place < min(len(expected), len(got)):
        return float(scores[expected[place]] - scores[got[place]])
    best = scores.topk(2).values
    return float(best[0] - best[1])
