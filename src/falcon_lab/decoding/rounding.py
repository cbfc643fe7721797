"""How far the width of a pass moves the target's logits: which differences of texts are ties.

A kernel adds in another order when it reads more tokens at once. In bfloat16 that moves a logit by
its spacing, and where two tokens are nearer to each other than that, plain and speculative decoding
may choose differently, though both are right.

Shapes: P prompt tokens, n tokens of a text, w tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.model.target import Target
from falcon_lab.tree import listed_tree

EXACT = (torch.float32, torch.float64)
"""Types whose rounding is no excuse: what differs there is a fault."""
WIDTHS = (2, 4, 8, 16, 32)
"""Tokens of the passes that are compared with steps of one."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text of n tokens read again, step by step, since another one has left it.

    Attributes:
        logits: ``[n + 1, V]`` float32, which plain decoding has at every place.
        noise: the farthest that passes over several tokens move the gap of the two best logits,
            anywhere in the text; None in a type where rounding is no excuse.
    """

    logits: Tensor
    noise: float | None


def is_tie(gap: float | None, noise: float | None) -> bool:
    """Return whether rounding explains that two texts part.

    Args:
        gap: between the logits of the two tokens, as plain decoding has them; None: not known.
        noise: of the text (``Reading``).
    """
    return gap is not None and noise is not None and abs(gap) <= noise


@torch.no_grad()
def read_again(
    target: Target,
    prompt: Tensor,
    tokens: Sequence[int],
    widths: Sequence[int] = WIDTHS,
) -> Reading:
    """Read a text as plain decoding does, and in a type that is not ``EXACT`` in wider passes too.

    Args:
        target: as it decodes: its passes, device and type.
        prompt: ``[P]`` long.
        tokens: the text behind it.
        widths: of the passes.
    """
    first, *steps = _passes(target, prompt, tokens, 1)
    exact = target.dtype in EXACT
    noise = None if exact else _noise(target, prompt, tokens, steps, widths)
    return Reading(torch.cat([first, *steps]), noise)


def _noise(
    target: Target,
    prompt: Tensor,
    tokens: Sequence[int],
    steps: Sequence[Tensor],
    widths: Sequence[int],
) -> float:
    """Return the farthest that passes over several tokens move the gap of the two best logits."""
    if not tokens:
        return 0.0
    best = [logits.topk(2) for logits in steps]
    pairs = torch.cat([each.indices for each in best])
    gaps = _gap(torch.cat([each.values for each in best]))
    farthest = gaps.new_zeros(())
    for width in widths:
        _, *wide = _passes(target, prompt, tokens, width)
        parts = zip(wide, pairs.split(width), gaps.split(width), strict=True)
        for logits, pair, gap in parts:
            farthest = farthest.maximum((_gap(logits.gather(1, pair)) - gap).abs().max())
    return float(farthest)


def _gap(best: Tensor) -> Tensor:
    return best[:, 0] - best[:, 1]


def _passes(target: Target, prompt: Tensor, tokens: Sequence[int], width: int) -> Iterator[Tensor]:
    """Yield float32 logits: ``[1, V]`` of the prompt, ``[w, V]`` of every pass behind it."""
    cache = target.new_cache(len(prompt) + len(tokens))
    yield target.prefill(prompt, cache).logits.float()
    if not tokens:
        return
    for part in prompt.new_tensor(tokens).split(width):
        start, count = cache.length, len(part)
        if width == 1:
            yield target.step(part[0], cache).logits.float()
            continue
        chain = listed_tree(part[0], part[1:].tolist(), range(count - 1), [0.0] * (count - 1))
        yield target.verify(chain, cache).logits.float()
        cache.commit([start], [range(count)])
