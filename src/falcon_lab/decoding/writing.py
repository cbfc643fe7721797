"""Many texts at a time, written by the target itself: the corpus a drafter will meet.

Shapes: B texts, P prompt tokens, S columns of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from falcon_lab.model.target import Target


@torch.inference_mode()
def write_on(target: Target, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Each prompt with what the target writes after it, greedily.

    Args:
        target: the model.
        prompts: B lists of at least one and at most ``length`` tokens.
        length: tokens of a text at the most, its prompt counted. A text ends before with one of
            the target's end tokens.
    """
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]  # on the left, so that ends align
    rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(rows, device=target.device)
    missing = torch.tensor(padding, device=target.device)
    texts = [list(prompt) for prompt in prompts]
    unfinished = [len(text) < length for text in texts]
    cache = target.new_cache(longest + length)
    start = 0
    while any(unfinished):
        features = target.backbone(
            tokens=tokens,
            positions=_positions(start, tokens.shape[1], missing),
            mask=_mask(start, tokens.shape[1], missing),
            cache=cache,
        )
        start += tokens.shape[1]
        tokens = target.head(features[:, -1:]).argmax(-1)
        for row, token in enumerate(tokens[:, 0].tolist()):
            if unfinished[row]:
                texts[row].append(token)
                unfinished[row] = len(texts[row]) < length and token not in target.eos_ids
    return texts


def _positions(start: int, new: int, missing: Tensor) -> Tensor:
    """``[B, new]``: columns less the padding before a text; 0 in the padding."""
    columns = torch.arange(start, start + new, device=missing.device)
    return (columns - missing[:, None]).clamp_min(0)


def _mask(start: int, new: int, missing: Tensor) -> Tensor:
    """``[B, new, start + new]``: causal, blind to the padding; padding sees itself alone."""
    keys = torch.arange(start + new, device=missing.device)
    queries = keys[start:, None]
    return ((keys <= queries) & (keys >= missing[:, None, None])) | (keys == queries)
