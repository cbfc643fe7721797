"""Weights a second time, in the order in which a CPU's matrix kernels read them.

MKL and oneDNN bring the weights of a linear map into their own order before they multiply, in
every call: of a pass over a few tokens that takes a third. oneDNN accepts weights that are in
that order already. The copy of frozen weights is made by the first pass that gains by it, made
again when a weight has changed or moved, and belongs to nothing that is saved or copied.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from falcon_lab.model.memory import free_memory

SMALLEST = 2**18
"""Numbers of a weight from which on packing pays; the call itself is dearer than a plain one."""

ROWS = 4
"""Rows that the kernels' order is chosen for; there is little between the orders for 4 and 64."""

FEWEST = {torch.float32: 3, torch.bfloat16: 1}
"""Dtypes that oneDNN packs -> rows of a pass from which on it pays: MKL reads float32 weights as
they are for one row or two, and is faster."""

SHARE = 0.5
"""Most of the free memory that the copies of a module's weights may take."""


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """Map ``[..., in]`` to ``[..., out]``, by the packed weight where there is one."""
    if packed is None:
        return functional.linear(hidden, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(hidden, packed, bias, "none", [], "")
    return found


class Packing:
    """The packed form of some weights, for as long as they stay as they are.

    Copies and what is pickled begin without it.
    """

    def __init__(self) -> None:
        self._of: list[tuple[int, int]] = []
        self._storages: list[Any] = []  # held, so that no other weight gets an address of theirs
        self._packed: list[Tensor | None] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(Packing())

    def __call__(self, weights: Sequence[Tensor], hidden: Tensor) -> Sequence[Tensor | None]:
        """Return the packed form of each weight, or None where it is to be used as it is.

        Args:
            weights: ``[out, in]`` each, of one linear map after the other.
            hidden: ``[..., in]``, which the first of them maps.
        """
        if not _wanted(weights[0], hidden):
            if self._packed and weights[0].device.type != "cpu":
                self._forget()
            return [None] * len(weights)
        found = [_state(weight) for weight in weights]
        if found != self._of:
            self._forget()  # before new ones are made
            self._packed = _pack(weights, [version >= 0 for _, version in found])
            self._of, self._storages = found, [weight.untyped_storage() for weight in weights]
        return self._packed

    def _forget(self) -> None:
        self._of, self._storages, self._packed = [], [], []


class NormedMap(NamedTuple):
    """A linear map behind a root-mean-square norm.

    Attributes:
        norm: ``[in]``, what the norm multiplies by.
        weight: ``[out, in]``.
        bias: ``[out]``, or None.
    """

    norm: Tensor
    weight: Tensor
    bias: Tensor | None


class JoinedMaps:
    """Linear maps of the same hidden states, as one map with a packed weight.

    What the norms multiply by is in the weight, so that it maps what they have in common.

    Args:
        maps: each behind its norm.
        epsilon: of all norms.
    """

    def __init__(self, maps: Sequence[NormedMap], epsilon: float) -> None:
        self._maps, self._epsilon = list(maps), epsilon
        self._of: list[tuple[int, int]] = []
        self._storages: list[Any] = []  # as of ``Packing``
        self._weight: Tensor | None = None  # packed
        self._bias: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(JoinedMaps(self._maps, self._epsilon))

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """Map ``[..., in]``, before the norms.

        Returns:
            What each of the maps gives; None where there is no packed weight, or it does not pay.
        """
        if not _wanted(self._maps[0].weight, hidden):
            return None
        parts = [part for one in self._maps for part in one if part is not None]
        found = [_state(part) for part in parts]
        if found != self._of:
            self._weight = None  # before a new one is made
            self._weight, self._bias = self._joined([version >= 0 for _, version in found])
            self._of, self._storages = found, [part.untyped_storage() for part in parts]
        if self._weight is None:
            return None
        normed = functional.rms_norm(hidden, hidden.shape[-1:], None, self._epsilon)
        mapped = linear(normed, self._maps[0].weight, self._bias, self._weight)
        return mapped.split([len(one.weight) for one in self._maps], -1)

    def _joined(self, counted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """Return the packed weight and the bias; None and None where it cannot be packed."""
        size = sum(one.weight.numel() for one in self._maps)
        if not all(counted) or size < SMALLEST:
            return None, None
        with torch.no_grad():
            weight = torch.cat([one.weight * one.norm for one in self._maps])
            [packed] = _pack([weight], [True])
            biases = [
                one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias
                for one in self._maps
            ]
            some = any(one.bias is not None for one in self._maps)
            return packed, torch.cat(biases) if some else None


def _state(weight: Tensor) -> tuple[int, int]:
    """Return what tells whether a weight has changed or moved; -1 where changes are not counted.

    An optimiser's own kernel need not count them, and inference mode's tensors cannot.
    """
    counted = not (weight.requires_grad or weight.is_inference())
    return weight.data_ptr(), weight._version if counted else -1


def _wanted(weight: Tensor, hidden: Tensor) -> bool:
    """Return whether this pass may use packed weights, and would gain by them."""
    if torch.compiler.is_compiling() or weight.device.type != "cpu" or weight.dtype != hidden.dtype:
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not packs(weight.dtype):
        return False
    return hidden.shape[:-1].numel() >= FEWEST[weight.dtype]


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies by packed weights of a dtype here."""
    if not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype in FEWEST


def _pack(weights: Sequence[Tensor], counted: Sequence[bool]) -> list[Tensor | None]:
    """Pack the large ones whose changes are counted, if there is room for all."""
    fit = [
        one and weight.numel() >= SMALLEST and weight.is_contiguous() and packs(weight.dtype)
        for weight, one in zip(weights, counted, strict=True)
    ]
    size = sum(weight.nbytes for weight, one in zip(weights, fit, strict=True) if one)
    room = free_memory(torch.device("cpu"))
    if room is not None and size > SHARE * room:
        return [None] * len(weights)
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return [reorder(w.detach(), ROWS) if one else None for w, one in zip(weights, fit, strict=True)]
