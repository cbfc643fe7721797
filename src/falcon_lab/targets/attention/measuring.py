"""How long backends take to read a tree behind a context, layer for layer.

Shapes: B batch, A query heads, G key/value heads, N nodes of a tree, P rows of its context, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from falcon_lab.benchmarking.machine import fastest
from falcon_lab.targets.attention.backend import Backend
from falcon_lab.targets.attention.masked import fold, widened

if TYPE_CHECKING:
    from falcon_lab.targets.target import Target

SDPA = "sdpa"
"""PyTorch's attention with the whole mask, without one for a single row."""

TURNS = 3
"""Times that the backends follow each other, so that a busy moment hits all of them."""


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        heads: A.
        groups: G.
        head_size: D.
    """

    heads: int
    groups: int
    head_size: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, target: Target) -> Self:
        """A target's."""
        config: Any = target.config
        heads: int = config.num_attention_heads
        groups: int = getattr(config, "num_key_value_heads", None) or heads
        size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(heads, groups, size, target.device, target.dtype)


@dataclass(frozen=True)
class Timing:
    """One backend's time.

    Attributes:
        backend: its name.
        context: P.
        rows: N.
        seconds: of one call, the best of many.
    """

    backend: str
    context: int
    rows: int
    seconds: float


@torch.inference_mode()
def time_attention(
    backends: Mapping[str, Backend],
    shape: AttentionShape,
    contexts: Sequence[int],
    rows: Sequence[int],
    *,
    seconds: float,
) -> Iterator[Timing]:
    """Time sdpa and the backends, in turns, with batches of one.

    Args:
        backends: by name, beside ``sdpa``.
        shape: of a layer.
        contexts: P, one after the other.
        rows: N for each of them.
        seconds: for each backend, context and N.
    """
    for context in contexts:
        for count in rows:
            best: dict[str, float] = {}
            for _ in range(TURNS):
                for name, call in calls(backends, shape, context, count).items():
                    found = fastest(call, shape.device, seconds=seconds / TURNS)
                    best[name] = min(best.get(name, found), found)
            yield from (Timing(name, context, count, taken) for name, taken in best.items())


def calls(
    backends: Mapping[str, Backend], shape: AttentionShape, context: int, rows: int
) -> dict[str, Callable[[], Tensor]]:
    """The same attention through sdpa and every backend; what a pass prepares once is ready."""
    drawn = torch.Generator().manual_seed(0)

    def states(heads: int, count: int) -> Tensor:
        made = torch.randn(1, heads, count, shape.head_size, generator=drawn)
        return made.to(shape.device, shape.dtype)

    query = states(shape.heads, rows)
    keys, values = (states(shape.groups, context + rows) for _ in range(2))
    scale = shape.head_size**-0.5
    # Two chains side by side: what decides the time of a tree is its number of nodes.
    node = torch.arange(rows, device=shape.device)
    tree = ((node[:, None] >= node) & ((node[:, None] - node) % 2 == 0))[None, None]
    whole = widened(tree, context + rows).repeat(1, 1, shape.heads // shape.groups, 1)
    sdpa = partial(
        F.scaled_dot_product_attention,
        *(fold(query, shape.groups), keys, values),
        attn_mask=whole if rows > 1 else None,
        scale=scale,
    )
    mask = tree if rows > 1 else None
    ours = {n: partial(b, query, keys, values, mask, scale=scale) for n, b in backends.items()}
    return {SDPA: sdpa, **ours}
