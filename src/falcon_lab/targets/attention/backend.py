"""What an attention backend and the kernel below it promise.

Shapes: B batch, A query heads, G key/value heads, N new rows, S keys (P earlier rows, then the N
new ones), W keys that a mask is about (the last ones), D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from falcon_lab.targets.attention.merging import Partial


class Backend(Protocol):
    """Attention of new rows over a cache, in which all rows see what is older than a mask."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[B, A, N, D]``.
            keys: ``[B, G, S, D]``, where G divides A.
            values: ``[B, G, S, D]``.
            mask: ``[B or 1, 1, N, W]`` bool, who sees whom among the last W keys; every row sees
                the S - W before them, and at least one of the W. None: every key.
            scale: of the scores.
            causal: the new rows see each other as a text's do, whatever ``mask`` says.

        Returns:
            ``[B, A, N, D]``.
        """
        ...


class Kernel(Protocol):
    """Attention without a mask that tells the log-sum-exp of its scores."""

    @property
    def name(self) -> str:
        """As in ``target.attention``."""
        ...

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Why it cannot run on such tensors here, or None."""
        ...

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        """Attend.

        Args:
            query: ``[B, A, N, D]``.
            keys: ``[B, G, S, D]`` with at least one key; S is N where ``causal``.
            values: ``[B, G, S, D]``.
            scale: of the scores.
            causal: row i sees keys 0..i alone.
        """
        ...
