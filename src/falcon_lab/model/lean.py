"""A short forward pass for Llama-like layers, over the very weights of the Hugging Face modules.

A decoding step of a small model is bound by the number of calls it makes, and a Hugging Face
layer makes many. This does the same arithmetic in fewer: no module calls, no rotation that is
computed and thrown away, no copies of grouped keys. On a CPU it multiplies by packed weights
(``packed.py``); moving, loading or training the modules needs no word to it. ``Backbone`` uses it
where no gradient is wanted and keys go to a cache; loading a target proves it equal to the model
(``loading.py``).

Shapes: B batch, T new tokens, S keys (cached ones and the new ones), H hidden, A query heads,
G key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from falcon_lab.interfaces import LayerPlan, MlpGate
from falcon_lab.model.attention.backend import Backend
from falcon_lab.model.attention.registration import OURS
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.packed import JoinedMaps, NormedMap, Packing, linear

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose layers are made of the parts below and nothing else."""

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose frequencies do not depend on the length of the text."""

WHOLE = LayerPlan()

Masks = Tensor | dict[str, Tensor] | None


Packed = Sequence[Tensor | None]
"""The packed form of a layer's weights, in the order of ``Layer.weights``."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm over the last dimension."""

    weight: Tensor
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Scale ``[..., D]`` to norm one, and by the weights."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.epsilon)


class NoNorm(Norm):
    """Stands where a drafter's layers go without one."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return what it is given."""
        return hidden


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden: Tensor, packed: Tensor | None) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``, by the packed weight where there is one."""
        return linear(hidden, self.weight, self.bias, packed)


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a decoder layer; tensors are the modules' own parameters.

    Attributes:
        number: index in the cache.
        kind: key of its mask where layers differ in kind.
        scale: of the attention's scores.
        query_norm, key_norm: over each head (Qwen 3), or None.
    """

    number: int
    kind: str | None
    scale: float
    before_attention: Norm
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    query_norm: Norm | None
    key_norm: Norm | None
    before_mlp: Norm
    gate: Projection
    up: Projection
    down: Projection
    activation: Callable[[Tensor], Tensor]

    def mlp(self, packed: Packed, hidden: Tensor) -> Tensor:
        """Return what the feed-forward network adds to hidden states ``[..., H]``."""
        between = self.before_mlp(hidden)
        gate, up, down = packed[4:]
        inner = self.activation(self.gate(between, gate)) * self.up(between, up)
        return self.down(inner, down)

    def network(self, packed: Packed, hidden: Tensor, gate: MlpGate | None) -> Tensor:
        """Return the same, zero for tokens that a gate keeps from the network."""
        if gate is None:
            return self.mlp(packed, hidden)
        from falcon_lab.model.gating import gated

        flat = hidden.flatten(0, -2)

        def network(chosen: Tensor | None) -> Tensor:
            return self.mlp(packed, flat if chosen is None else flat[chosen])

        return gated(gate, self.number, flat, network).view_as(hidden)

    @property
    def attention_maps(self) -> list[NormedMap]:
        """Return the maps from what the layer reads to queries, keys and values."""
        norm = self.before_attention.weight
        parts = self.query, self.key, self.value
        return [NormedMap(norm, part.weight, part.bias) for part in parts]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Return the weights of all projections, in their order."""
        attention = self.query, self.key, self.value, self.output
        return tuple(one.weight for one in (*attention, self.gate, self.up, self.down))


@dataclass(frozen=True, slots=True)
class Attending:
    """What the attentions of one pass share.

    Attributes:
        head_size: D.
        turn: cosines and signed sines, ``[B or 1, 1, T, D]`` each.
        masks: in the form that the kernel takes.
        cache: earlier keys and values, to which new ones are appended.
        backend: attends; None: PyTorch's sdpa.
    """

    head_size: int
    turn: tuple[Tensor, Tensor]
    masks: Masks
    cache: KVCache
    backend: Backend | None

    def __call__(self, layer: Layer, packed: Packed, hidden: Tensor) -> Tensor:
        """Return what a layer's attention adds to the hidden states ``[B, T, H]``."""
        normed = layer.before_attention(hidden)
        query = layer.query(normed, packed[0])
        key, value = layer.key(normed, packed[1]), layer.value(normed, packed[2])
        return self.attend(layer, packed, (query, key, value))

    def attend(self, layer: Layer, packed: Packed, projected: Sequence[Tensor]) -> Tensor:
        """Return the same of queries ``[B, T, A·D]``, keys and values ``[B, T, G·D]``."""
        query, key, value = (self._heads(part) for part in projected)
        batch, _, new, size = query.shape
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        query, key = _rotate(query, self.turn), _rotate(key, self.turn)
        keys, values = self.cache.update(key, value, layer.number)
        mask = self.masks[str(layer.kind)] if isinstance(self.masks, dict) else self.masks
        if self.backend is not None:
            seen = self.backend(query, keys, values, mask, scale=layer.scale)
        else:
            # The queries of a group stand one below the other, and no key is copied.
            grouped = query.reshape(batch, keys.shape[1], -1, size)
            seen = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=layer.scale
            )
        seen = seen.reshape(batch, -1, new, size).transpose(1, 2)
        return layer.output(seen.reshape(batch, new, -1), packed[3])

    def _heads(self, hidden: Tensor) -> Tensor:
        """Split ``[B, T, A·D]`` by head into ``[B, A, T, D]``."""
        return hidden.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class LeanLayers:
    """The decoder layers and the final norm of a base model.

    Args:
        base: a base model that ``supports`` accepts.
    """

    def __init__(self, base: Any) -> None:
        config = base.config
        kinds = getattr(config, "layer_types", None)
        self.head_size = int(base.layers[0].self_attn.head_dim)
        self.rotary: Any = base.rotary_emb
        self.norm = _norm(base.norm)
        self.layers = [
            _layer(number, layer, kinds[number] if kinds else None)
            for number, layer in enumerate(base.layers)
        ]
        self._weights = [weight for layer in self.layers for weight in layer.weights]
        self._packing = Packing()
        self._joined: dict[tuple[int, ...], JoinedMaps] = {}  # of groups of layers

    @classmethod
    def of(cls, base: Any) -> Self | None:
        """Return the short pass of a base model; None where its modules do more than we know of."""
        return cls(base) if supports(base) else None

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Masks,
        cache: KVCache,
        backend: Backend | None = None,
        see: Callable[[int, Tensor], None] | None = None,
        plan: LayerPlan = WHOLE,
    ) -> Tensor:
        """Append tokens to the cache.

        Args:
            hidden: ``[B, T, H]``, what the first layer of the plan reads.
            positions: ``[B or 1, T]`` long.
            mask: ``[B or 1, 1, T, S]`` bool (one for each kind of layer, where there are
                several); None: every new token attends to every key.
            cache: earlier keys and values.
            backend: attends; its masks may be about the last keys alone. None: PyTorch's sdpa.
            see: is called with a layer's number and the hidden states ``[B, T, H]`` that it reads.
            plan: which layers, and what of them.

        Returns:
            ``[B, T, H]`` where the plan ends: after the final norm, as a rule.
        """
        if plan.gate is not None:
            plan.gate.begin(positions.expand(hidden.shape[:2]).flatten())
        queries = self.layers[0].query.weight.shape[0] // self.layers[0].key.weight.shape[0]
        masks = _for_groups(mask, queries) if backend is None else mask
        turn = self._turn(positions, hidden.dtype)
        attend = Attending(self.head_size, turn, masks, cache, backend)
        all_packed = self._by_layer(hidden)
        groups = {group[0]: group for group in plan.groups}
        beside: dict[int, Tensor] = {}  # what attentions of a group add, by layer
        for layer in self.layers[plan.first : plan.last]:
            if see is not None:
                see(layer.number, hidden)
            if layer.number in groups:
                beside = self._beside(attend, groups[layer.number], plan, hidden, all_packed)
            packed = all_packed[layer.number]
            if layer.number in beside:
                hidden = beside[layer.number] + hidden
            elif layer.number not in plan.skip_attention:
                hidden = attend(layer, packed, hidden) + hidden
            if layer.number not in plan.skip_mlp:
                hidden = layer.network(packed, hidden, plan.gate) + hidden
        return self.norm(hidden) if plan.last is None else hidden

    def _by_layer(self, hidden: Tensor) -> list[Packed]:
        """Return the packed weights of each layer."""
        packed = self._packing(self._weights, hidden)
        count = len(packed) // len(self.layers)
        return [packed[start : start + count] for start in range(0, len(packed), count)]

    def _beside(
        self,
        attend: Attending,
        group: tuple[int, ...],
        plan: LayerPlan,
        hidden: Tensor,
        packed: Sequence[Packed],
    ) -> dict[int, Tensor]:
        """Return what the attentions of a group add, each to what the group reads."""
        layers = [self.layers[number] for number in group if number not in plan.skip_attention]
        if plan.beside is not None:
            calls = [partial(attend, one, packed[one.number], hidden) for one in layers]
            added = plan.beside(calls, hidden)
            return {one.number: each for one, each in zip(layers, added, strict=True)}
        projected = self._projected(layers, hidden)
        if projected is None:
            return {one.number: attend(one, packed[one.number], hidden) for one in layers}
        return {
            one.number: attend.attend(one, packed[one.number], parts)
            for one, parts in zip(layers, projected, strict=True)
        }

    def _projected(
        self, layers: Sequence[Layer], hidden: Tensor
    ) -> list[tuple[Tensor, ...]] | None:
        """Return queries, keys and values of layers that read the same, by one product.

        None: one product is none that pays, or their norms differ in more than their weights.
        """
        if len(layers) < 2 or len({one.before_attention.epsilon for one in layers}) > 1:
            return None
        numbers = tuple(one.number for one in layers)
        if numbers not in self._joined:
            maps = [part for one in layers for part in one.attention_maps]
            self._joined[numbers] = JoinedMaps(maps, layers[0].before_attention.epsilon)
        found = self._joined[numbers](hidden)
        if found is None:
            return None
        return [found[start : start + 3] for start in range(0, len(found), 3)]

    def _turn(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, each ``[B or 1, 1, T, D]``."""
        angles = positions[:, None, :, None] * self.rotary.inv_freq.float()
        scale = self.rotary.attention_scaling
        cosine, sine = angles.cos() * scale, angles.sin() * scale
        turned = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        return turned[0].to(dtype), turned[1].to(dtype)


def supports(base: Any) -> bool:
    """Return whether a base model's layers are the plain ones of its family.

    Replaced modules (quantised, adapted) and hooks (offloading) are not.
    """
    config = base.config
    if config.model_type not in FAMILIES or not _takes_masks(config._attn_implementation):
        return False
    if not len(base.layers):
        return False  # nothing to walk: the family itself says what is wrong
    rotary = base.rotary_emb
    if rotary.rope_type not in STATIC_ROPE:
        return False
    head_size = getattr(base.layers[0].self_attn, "head_dim", None)
    if head_size is None or 2 * rotary.inv_freq.shape[0] != head_size:
        return False  # rotates a part of each head
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    return not hooked and all(_is_plain(layer) for layer in base.layers)


def _takes_masks(implementation: str) -> bool:
    return implementation == "sdpa" or implementation.startswith(OURS)


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    return all(type(projection) is nn.Linear for projection in projections)


def _layer(number: int, layer: Any, kind: str | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return Layer(
        number=number,
        kind=kind,
        scale=attention.scaling,
        before_attention=_norm(layer.input_layernorm),
        query=_projection(attention.q_proj),
        key=_projection(attention.k_proj),
        value=_projection(attention.v_proj),
        output=_projection(attention.o_proj),
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        before_mlp=_norm(layer.post_attention_layernorm),
        gate=_projection(mlp.gate_proj),
        up=_projection(mlp.up_proj),
        down=_projection(mlp.down_proj),
        activation=mlp.act_fn,
    )


def _norm(module: Any) -> Norm:
    if isinstance(module, nn.Identity):
        return NoNorm(torch.empty(0), math.nan)  # an epsilon that equals no other
    return Norm(module.weight, module.variance_epsilon)


def _projection(module: Any) -> Projection:
    return Projection(module.weight, module.bias)


def _rotate(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding (arXiv 2104.09864, eq. 34), halves of a head as pairs."""
    cosine, sine = turn
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return torch.addcmul(heads * cosine, swapped, sine)


def _for_groups(mask: Masks, groups: int) -> Masks:
    """Repeat masks for queries one below the other, ``groups`` of them for a key head."""
    if mask is None or groups == 1:
        return mask
    if isinstance(mask, dict):
        return {kind: one.repeat(1, 1, groups, 1) for kind, one in mask.items()}
    return mask.repeat(1, 1, groups, 1)
