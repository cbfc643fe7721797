"""The prefix without a mask, the few new rows with one, and both merged.

Every node of a tree sees the whole text before it, so that a kernel that takes no mask can read the
long part. A mask is built for the new rows alone.

Shapes: B batch, A query heads, G key/value heads, N new rows, S keys (P earlier rows, then the N
new ones), W keys that a mask is about (the last ones), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from falcon_lab.targets.attention.backend import Kernel
from falcon_lab.targets.attention.masked import fold, masked_attention
from falcon_lab.targets.attention.merging import merge, with_tree

LARGEST_TREE = 512
"""Rows whose scores among each other are computed entry by entry."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A backend on top of a kernel; attention with the whole mask where that is the better way.

    Attributes:
        kernel: reads the prefix.
        least: earlier rows from which merging pays.
    """

    kernel: Kernel
    least: int = 0

    def merges(self, new: int, earlier: int) -> bool:
        """Whether ``new`` rows after ``earlier`` ones are merged: if not, give the whole mask."""
        return earlier >= max(self.least, 1) and new <= LARGEST_TREE

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
        """Attend; arguments as in ``Backend``."""
        if mask is None or not mask.shape[-1]:  # PyTorch takes its best kernel by itself
            return masked_attention(query, keys, values, None, scale=scale)
        new, size = query.shape[2:]
        refused = self.kernel.refuses(query.device, query.dtype, size)
        if refused is None and values.shape[-1] == size:
            if causal:
                return self._text(query, keys, values, scale)
            if self.merges(new, keys.shape[2] - mask.shape[-1]):
                return self._tree(query, keys, values, mask, scale)
        return masked_attention(query, keys, values, mask, scale=scale)

    def _text(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Rows that see each other as a text's do: the kernel knows how, if they are all."""
        new, earlier = query.shape[2], keys.shape[2] - query.shape[2]
        part = self.kernel(
            query, keys[:, :, earlier:], values[:, :, earlier:], scale=scale, causal=new > 1
        )
        if earlier:
            prefix = self.kernel(query, keys[:, :, :earlier], values[:, :, :earlier], scale=scale)
            part = merge(prefix, part)
        return part.seen.to(query.dtype)

    def _tree(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        folded = fold(query, keys.shape[1])
        earlier = keys.shape[2] - mask.shape[-1]
        prefix = self.kernel(folded, keys[:, :, :earlier], values[:, :, :earlier], scale=scale)
        new_keys, new_values = keys[:, :, earlier:], values[:, :, earlier:]
        seen = with_tree(prefix, folded, new_keys, new_values, mask, scale=scale)
        return seen.reshape(query.shape)
