"""The draft model: Llama-like layers whose keys and values also come from the target's features.

Shapes: B batch, Q tokens of blocks, C tokens of context, n tokens of either, S = C + Q, L tapped
layers, G key/value heads, N query heads, D head size, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.model.attention.block_sparse import block_sparse_attention, is_worthwhile
from falcon_lab.model.families import LayerSizes, own_sizes
from falcon_lab_dflash import DFlashConfig


class Shape(NamedTuple):
    """What a draft layer is made by.

    Attributes:
        sizes: of a layer.
        base: of the rotary frequencies.
        eps: of the norms; None is torch's own.
    """

    sizes: LayerSizes
    base: float
    eps: float | None

    @classmethod
    def of(cls, config: Any, options: DFlashConfig) -> Shape:
        """Return that of a target's Hugging Face configuration, where the options say no other."""
        sizes = own_sizes(config, options)
        sizes = sizes._replace(head=sizes.head + sizes.head % 2)  # rotation takes pairs
        return cls(sizes, options.rope_base, options.eps)

    def norm(self, width: int) -> nn.RMSNorm:
        """Make a norm of so many channels."""
        return nn.RMSNorm(width, eps=self.eps)


class Rotation(NamedTuple):
    """Hold rotary embeddings of some positions, ``[B or 1, 1, n, D]`` each."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, positions: Tensor, head: int, base: float, dtype: torch.dtype) -> Rotation:
        """Compute them for ``[B or 1, n]`` positions."""
        power = torch.arange(0, head, 2, device=positions.device, dtype=torch.float32) / head
        angle = positions[:, None, :, None].float() * base**-power
        angle = torch.cat([angle, angle], dim=-1)
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def turn(self, hidden: Tensor) -> Tensor:
        """Rotate ``[B, heads, n, D]``."""
        first, second = hidden.chunk(2, dim=-1)
        return hidden * self.cosine + torch.cat([-second, first], dim=-1) * self.sine


class DraftLayer(nn.Module):
    """Attend to context and block, then apply an MLP, each with a norm and a residual."""

    def __init__(self, made: Shape) -> None:
        super().__init__()
        self.shape = shape = made.sizes
        hidden, inner = shape.hidden, shape.inner
        self.before_attention, self.before_mlp = made.norm(hidden), made.norm(hidden)
        self.query = nn.Linear(hidden, shape.heads * shape.head, bias=False)
        self.key = nn.Linear(hidden, shape.groups * shape.head, bias=False)
        self.value = nn.Linear(hidden, shape.groups * shape.head, bias=False)
        self.out = nn.Linear(shape.heads * shape.head, hidden, bias=False)
        self.query_norm, self.key_norm = made.norm(shape.head), made.norm(shape.head)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def keys_values(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Turn ``[B, n, H]`` of context or of a normed block into two ``[B, G, n, D]``."""
        keys = self.key_norm(self._heads(self.key(hidden), self.shape.groups))
        return rotation.turn(keys), self._heads(self.value(hidden), self.shape.groups)

    def normed(self, hidden: Tensor) -> Tensor:
        """Normalise a block's tokens for attention."""
        normed: Tensor = self.before_attention(hidden)
        return normed

    def forward(
        self,
        hidden: Tensor,
        normed: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Send tokens of blocks through the layer.

        Args:
            hidden: ``[B, Q, H]``.
            normed: the same behind the first norm.
            rotation: of their positions.
            keys: ``[B, G, S, D]``, of context and blocks.
            values: the same.
            mask: ``[B, Q, S]`` bool; None: all attend to all.
        """
        query = self.query_norm(self._heads(self.query(normed), self.shape.heads))
        seen = self._attended(
            rotation.turn(query), keys, values, None if mask is None else mask[:, None]
        )
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        inner = self.before_mlp(hidden)
        moved: Tensor = self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return hidden + moved

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and is_worthwhile(query, mask):
            return block_sparse_attention(query, keys, values, mask, scale=self.shape.head**-0.5)
        gqa = self.shape.heads != self.shape.groups
        return functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=gqa)

    def _heads(self, hidden: Tensor, heads: int) -> Tensor:
        return hidden.view(*hidden.shape[:-1], heads, self.shape.head).transpose(1, 2)


class DraftModel(nn.Module):
    """Stack layers that have the target's features in their keys and values (KV injection).

    Args:
        made: of every layer.
        layers: how many.
        taps: L.
    """

    def __init__(self, made: Shape, layers: int, taps: int) -> None:
        super().__init__()
        self.shape, self._base = made.sizes, made.base
        shape = self.shape
        self.fuse = nn.Linear(taps * shape.hidden, shape.hidden, bias=False)
        self.fuse_norm = made.norm(shape.hidden)
        self.layers: Any = nn.ModuleList(DraftLayer(made) for _ in range(layers))
        self.norm = made.norm(shape.hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Return that of the weights."""
        return self.fuse.weight.dtype

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Fuse what all layers read of the target.

        Args:
            taps: ``[B, C, L, H]``.
            positions: ``[B or 1, C]`` long.

        Returns:
            Keys and values, ``[layers, B, G, C, D]`` each.
        """
        hidden = self.fuse_norm(self.fuse(taps.to(self.dtype).flatten(2)))
        rotation = self.rotation(positions)
        pairs = [layer.keys_values(hidden, rotation) for layer in self.layers]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def rotation(self, positions: Tensor) -> Rotation:
        """Compute the rotation of ``[B or 1, n]`` positions."""
        return Rotation.of(positions, self.shape.head, self._base, self.dtype)
