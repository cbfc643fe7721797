"""One forward pass of fixed shape, and the ways to run it behind one interface.

A ``Forward`` says what is computed: an ``nn.Module`` from a few input tensors, with new positions
of a KV cache where it has one, to output tensors. A ``ForwardPass`` runs it: ``EagerPass`` calls
the module, ``CompiledPass`` what inductor has compiled of it ahead of time, and ``GraphPass``
replays CUDA graphs. Whoever drafts or verifies calls a pass and does not know which one it is: what
a compiled or captured pass does not support goes through the module.

Shapes: n new positions, N the same with padding, W columns of a mask, H hidden, V vocabulary,
L tapped layers.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.interfaces import LayerPlan, Outputs
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.kv_layout import KVLayout
from falcon_lab.model.lean import WHOLE

Inputs = list[Tensor]
Shapes = tuple[tuple[int, ...], ...]


class NewPositions(NamedTuple):
    """What a pass appends to a KV cache of one sequence.

    Attributes:
        positions: ``[n]`` long, of the new keys.
        mask: ``[n, W]`` bool attention mask over the last W keys, W >= n; all keys before them are
            attended to. None: every new position attends to every key.
        cache: holds the keys and values before them.
    """

    positions: Tensor
    mask: Tensor | None
    cache: Any  # a KVCache, or what stands in for it while a pass is traced or captured


class Forward(nn.Module, ABC):
    """What a pass computes, however it is run. A subclass has no state between its calls.

    Attributes:
        name: of the pass, for the user.
        wide_mask: whether masks may be about earlier keys than the new ones, too.
        pads_graphs: whether inputs are padded for CUDA graphs, too.

    Args:
        name: see above.
    """

    wide_mask = True
    pads_graphs = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def layout(self) -> KVLayout:
        """Return what the pass stores of every position: nothing, unless overridden."""
        return KVLayout(())

    @abstractmethod
    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Compute the outputs, and append keys and values to the cache if there is one."""
        ...

    def supports(self, inputs: Inputs) -> bool:
        """Return whether passes over such inputs come often enough to be compiled or captured."""
        return True

    def count(self, shapes: Shapes) -> int:
        """Return how many positions inputs of such shapes append."""
        return 0

    def padded(self, shapes: Shapes, sizes: Sequence[int]) -> Shapes:
        """Return shapes that many inputs fit into; new positions are padded behind.

        Args:
            shapes: of the inputs.
            sizes: numbers of positions that there are passes for, in rising order.
        """
        return shapes

    def trimmed(self, outputs: Outputs, inputs: Inputs) -> Outputs:
        """Return the outputs of padded inputs without what padding has added."""
        return outputs

    # --- for a compiler alone ---------------------------------------------------------------

    def compiles(self, inputs: Inputs) -> bool:
        """Return whether such inputs, which the pass supports, are few enough to be compiled."""
        return True

    def with_indices(self, inputs: Inputs) -> Inputs:
        """Return the inputs and what ``traced`` needs to know of them beside their shapes."""
        return inputs

    def traced(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Compute ``forward`` of padded inputs (``with_indices``), as a compiler can trace it."""
        return self.forward(inputs, new)

    def label(self, shapes: Shapes) -> str:
        """Return the name of the pass for inputs of such shapes."""
        return self.name

    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield inputs of every shape that rounds of up to ``most`` new tokens begin with."""
        yield from ()


class NewTokens(Forward):
    """A pass of decoder layers over n new tokens, each with a row in the input and in every output.

    Args:
        backbone: the decoder layers.
        name: of the pass, for the user.
    """

    def __init__(self, backbone: Backbone, name: str) -> None:
        super().__init__(name)
        self.backbone = backbone

    @property
    def layout(self) -> KVLayout:
        """Return that of the whole backbone, whose cache it is."""
        return self.backbone.layout

    def count(self, shapes: Shapes) -> int:
        """Return the number of tokens."""
        return shapes[0][0]

    def padded(self, shapes: Shapes, sizes: Sequence[int]) -> Shapes:
        """Return a number of tokens that there is a pass for."""
        return ((size_for(shapes[0][0], sizes), *shapes[0][1:]),)

    def trimmed(self, outputs: Outputs, inputs: Inputs) -> Outputs:
        """Return what belongs to the tokens that were given."""
        new = inputs[0].shape[0]
        return tuple(output[:new] for output in outputs)

    def label(self, shapes: Shapes) -> str:
        """Return the name with the number of tokens."""
        return f"{self.name}-{shapes[0][0]}-tokens"


class PartForward(NewTokens):
    """A part of a language model, from ``[n]`` tokens or hidden states ``[n, H]`` to ``[n, H]``.

    Args:
        backbone: the decoder layers.
        plan: which of them.
        name: of the pass, for the user.
    """

    def __init__(self, backbone: Backbone, plan: LayerPlan, name: str) -> None:
        super().__init__(backbone, name)
        self.plan = plan

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Read ``[n]`` tokens, or what the first layer of the plan reads."""
        assert new is not None
        positions, mask, cache = new
        given = {"embeddings" if self.plan.first else "tokens": inputs[0][None]}
        hidden = self.backbone(
            positions=positions[None],
            mask=None if mask is None else mask[None],
            cache=cache,
            plan=self.plan,
            **given,
        )
        return (hidden[0],)


class TokensForward(NewTokens):
    """A language model from ``[n]`` tokens to hidden states ``[n, H]``, logits ``[n, V]`` and, with
    taps, ``[n, L, H]``.

    Args:
        backbone: the decoder layers.
        head: ``[n, H]`` hidden states -> ``[n, V]`` logits.
        name: of the pass, for the user.
        taps: layers whose hidden states are put out too.
        wide_mask: as of ``Forward``.
        plan: how whole passes go through the layers.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: Callable[[Tensor], Tensor],
        name: str,
        taps: Sequence[int] = (),
        *,
        wide_mask: bool = False,
        plan: LayerPlan = WHOLE,
    ) -> None:
        super().__init__(backbone, name)
        self.head, self.taps = head, tuple(taps)
        self.wide_mask, self.plan = wide_mask, plan

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Read ``[n]`` tokens."""
        assert new is not None
        positions, mask, cache = new
        hidden, *taps = self.backbone.tapped(
            self.taps,
            tokens=inputs[0][None],
            positions=positions[None],
            mask=None if mask is None else mask[None],
            cache=cache,
            plan=self.plan,
        )
        found = hidden[0]
        if not taps:
            return found, self.head(found)
        return found, self.head(found), taps[0][0]

    def label(self, shapes: Shapes) -> str:
        """Return the name with the number of tokens."""
        return f"{self.name}{'-tapped' if self.taps else ''}-{shapes[0][0]}-tokens"

    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield one to ``most`` tokens."""
        for new in range(1, most + 1):
            yield [torch.zeros(new, dtype=torch.long)]


class ForwardPass(ABC):
    """A way to run a ``Forward`` again and again.

    A pass over a cache serves one sequence at a time; its deep copy, for another sequence of a
    batch, is eager. One without a cache is shared by its copies.

    Attributes:
        padding: cache positions that a pass writes beyond those of its sequence.
        reserved_bytes: memory of the last cache that the next one reuses.
        is_eager: whether it goes through the module as it is.

    Args:
        forward: what is computed.
    """

    padding = 0
    is_eager = False

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPass:
        if not self.is_eager and not self._forward.layout.layers:
            return self
        return EagerPass(copy.deepcopy(self._forward, memo))

    @property
    def reserved_bytes(self) -> int:
        """Return zero, unless a subclass says otherwise."""
        return 0

    def capacity(self, positions: int) -> int:
        """Return the capacity of the cache that a sequence of so many positions gets."""
        return positions + self.padding

    def cache_bytes(self, positions: int) -> int:
        """Return the memory of that cache, exactly."""
        return self._forward.layout.bytes(self.capacity(positions))

    def new_cache(self, positions: int, most: int | None = None) -> KVCache:
        """Return an empty cache for one sequence; the one before may be of no use any more.

        Args:
            positions: that are needed.
            most: positions up to which it doubles when more are needed (``reserve``).
        """
        layout, capacity = self._forward.layout, self.capacity(positions)
        return KVCache(len(layout.layers), capacity, layout, most or capacity)

    def reserve(self, cache: Any, positions: int) -> bool:
        """Make room for a pass up to so many positions; whether the cache has grown."""
        grown: bool = cache.reserve(positions + self.padding)
        return grown

    @abstractmethod
    def prepare(self, most: int) -> None:
        """Compile or load the passes of rounds of up to so many new tokens, if that is slow."""
        ...

    @abstractmethod
    def supports(self, inputs: Inputs, new: NewPositions | None) -> bool:
        """Return whether these inputs take the way of this pass, and not the module's."""
        ...

    def __call__(self, inputs: Inputs, new: NewPositions | None = None) -> Outputs:
        """Compute the outputs, which belong to the caller, and append to the cache."""
        outputs = self._run(inputs, new) if self.supports(inputs, new) else None
        if outputs is None:
            outputs = self._forward(inputs, new)
        return outputs

    @abstractmethod
    def _run(self, inputs: Inputs, new: NewPositions | None) -> Outputs | None:
        """Run inputs that are supported; None if it turns out to be impossible."""
        ...


class EagerPass(ForwardPass):
    """The module as it is."""

    is_eager = True

    def prepare(self, most: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def supports(self, inputs: Inputs, new: NewPositions | None) -> bool:
        """Return True: a module accepts any shapes."""
        return True

    def __call__(self, inputs: Inputs, new: NewPositions | None = None) -> Outputs:
        """Compute the outputs, without the hooks that calling a module looks for."""
        return self._forward.forward(inputs, new)

    def _run(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        return self(inputs, new)


PassMaker = Callable[[Forward], ForwardPass]
"""Chooses how a ``Forward`` is run."""


def size_for(count: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the sizes that is at least ``count``, which is one of them at most."""
    return next(size for size in sizes if count <= size)


def shapes_of(inputs: Inputs) -> Shapes:
    """Return the shape of every input."""
    return tuple(tuple(part.shape) for part in inputs)


def pad_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Put zeros behind each dimension, up to a shape."""
    more = [
        side
        for have, want in zip(reversed(part.shape), reversed(shape), strict=True)
        for side in (0, want - have)
    ]
    return functional.pad(part, more) if any(more) else part
