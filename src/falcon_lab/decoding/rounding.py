"""How far the width of a pass moves the target's logits: which differences of texts are ties.

A kernel adds in another order when it reads more tokens at once. In bfloat16 that moves a logit by
its spacing, and where two tokens are nearer to each other than that, plain and speculative decoding
may choose differently, though both are right.

Shapes: P prompt tokens, n tokens of a text, w tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from falcon_lab.model.target import Target
from falcon_lab.tree import listed_tree

EXACT = (torch.float32, torch.float64)
"""Types whose rounding is no excuse: what differs there is a fault."""
WIDTHS = (2, 4, 8, 16, 32)
"""Tokens of the passes that are compared with steps of one."""


@torch.no_grad()
def rounding_noise(
    target: Target, prompt: Tensor, tokens: Sequence[int], widths: Sequence[int] = WIDTHS
) -> float:
    """Return the farthest that passes over several tokens move the gap of the two best logits.

    The text is read token by token, and again in chains of every width.

    Args:
        target: as it decodes: its passes, device and type.
        prompt: ``[P]`` long.
        tokens: the text behind it.
        widths: of the passes.
    """
    if not tokens:
        return 0.0
    best = [logits.topk(2) for logits in _passes(target, prompt, tokens, 1)]
    pairs = torch.cat([each.indices for each in best])
    gaps = _gap(torch.cat([each.values for each in best]))
    farthest = gaps.new_zeros(())
    for width in widths:
        parts = zip(
            _passes(target, prompt, tokens, width),
            pairs.split(width),
            gaps.split(width),
            strict=True,
        )
        for logits, pair, gap in parts:
            farthest = farthest.maximum((_gap(logits.gather(1, pair)) - gap).abs().max())
    return float(farthest)


def _gap(best: Tensor) -> Tensor:
    return best[:, 0] - best[:, 1]


def _passes(target: Target, prompt: Tensor, tokens: Sequence[int], width: int) -> Iterator[Tensor]:
    """Yield the float32 logits ``[w, V]`` of passes over so many tokens behind a prompt."""
    cache = target.new_cache(len(prompt) + len(tokens))
    target.prefill(prompt, cache)
    for part in prompt.new_tensor(tokens).split(width):
        start, count = cache.length, len(part)
        if width == 1:
            yield target.step(part[0], cache).logits.float()
            continue
        chain = listed_tree(part[0], part[1:].tolist(), range(count - 1), [0.0] * (count - 1))
        yield target.verify(chain, cache).logits.float()
        cache.commit([start], [range(count)])
