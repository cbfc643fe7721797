"""Passes through a part of the target's layers, for drafters that draft with the target itself.

Shapes: n new tokens, P provisional tokens of the round before them, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from torch import Tensor

from falcon_lab.errors import FalconLabError

NONE: frozenset[int] = frozenset()


class MlpGate(Protocol):
    """Decides token by token which feed-forward networks a pass leaves out (FFN-SkipLLM).

    One that is compared by identity, and used by one pass at a time.
    """

    def begin(self, positions: Tensor) -> None:
        """Begin a pass over tokens at these positions of their texts, ``[n]`` long."""
        ...

    def wanted(self, layer: int) -> Tensor | None:
        """Return which tokens go through a layer's network, ``[n]`` bool; None: all of them."""
        ...

    def seen(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Take in the hidden states before and behind a layer's network.

        Args:
            layer: counted from 0.
            before: ``[n, H]``, what entered the residual block.
            after: ``[n, H]``, the same with what the network added; as before where it was left
                out.
        """
        ...


class SideBySide(Protocol):
    """Computes what the attentions of a group add, on several devices (EasySpec).

    One that is compared by identity.
    """

    def __call__(self, attentions: Sequence[Callable[[], Tensor]], hidden: Tensor) -> list[Tensor]:
        """Return what each of them adds, ``[B, n, H]``.

        Args:
            attentions: compute it, and append keys and values to their layers' cache. One that is
                not called here leaves its layer's as they are.
            hidden: ``[B, n, H]``, what the group reads.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Which parts of a model a pass goes through. Decoder layers are counted from 0.

    A skipped attention or feed-forward network adds nothing to the hidden states; the residual
    connection around it stays. A layer whose attention is skipped stores no keys and values.

    The attentions of a group of layers all read the hidden states that the group's first layer
    reads. What each of them adds is added in its own layer, before its network, so that networks
    run one after the other: h += a_i; h += MLP_i(LN_i(h)).

    Attributes:
        first: the layer that the pass begins with, given the hidden states that it reads.
        last: the layer before which it ends, with the hidden states that this one would read;
            None: it goes to the end, through the final norm.
        skip_attention: layers whose attention is skipped.
        skip_mlp: layers whose feed-forward network is skipped.
        gate: asked before each of the other networks; None: they all run.
        groups: layers whose attentions run side by side, consecutive ones in each group.
        beside: computes the attentions of a group; None: they are computed here, all of them.
    """

    first: int = 0
    last: int | None = None
    skip_attention: frozenset[int] = NONE
    skip_mlp: frozenset[int] = NONE
    gate: MlpGate | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    beside: SideBySide | None = None

    @classmethod
    def exit_after(cls, layers: int, count: int) -> LayerPlan:
        """Return the plan of an early exit: the first layers, and the final norm.

        Args:
            layers: that are run.
            count: that the model has.
        """
        skipped = frozenset(range(layers, count))
        return cls(skip_attention=skipped, skip_mlp=skipped)

    @property
    def is_whole(self) -> bool:
        """Whether a pass goes through everything."""
        return self == LayerPlan()

    def check(self, count: int) -> None:
        """See that a model with ``count`` layers has those of the plan.

        Raises:
            FalconLabError: it has not, or a group is none.
        """
        last = count if self.last is None else self.last
        if not 0 <= self.first < last <= count:
            raise FalconLabError(
                f"a pass through layers {self.first} to {last - 1} of a target whose layers are 0 "
                f"to {count - 1} is not possible"
            )
        for what, skipped in (("attention", self.skip_attention), ("mlp", self.skip_mlp)):
            if wrong := sorted(layer for layer in skipped if not 0 <= layer < count):
                raise FalconLabError(
                    f"the {what} of layer {wrong[0]} cannot be skipped: the target has the layers "
                    f"0 to {count - 1}"
                )
        self._check_groups(self._span(count))

    def _check_groups(self, run: range) -> None:
        grouped: set[int] = set()
        for group in self.groups:
            shown = f"layers {', '.join(map(str, group))} cannot be a group"
            if not group or any(after != before + 1 for before, after in pairwise(group)):
                raise FalconLabError(f"{shown}: list consecutive layers in rising order")
            if not grouped.isdisjoint(group):
                raise FalconLabError(f"{shown}: layer {min(grouped & {*group})} is in another one")
            if group[0] not in run or group[-1] not in run:
                raise FalconLabError(
                    f"{shown}: the pass goes through layers {run[0]} to {run[-1]} alone"
                )
            grouped.update(group)

    def runs(self, count: int) -> tuple[int, ...]:
        """Return the layers of a model with ``count`` layers of which anything is run."""
        skipped = self.skip_attention & self.skip_mlp
        return tuple(layer for layer in self._span(count) if layer not in skipped)

    def work(self, count: int) -> float:
        """Return how many layers of such a model a pass runs; an attention alone is half of one."""
        skipped = (self.skip_attention, self.skip_mlp)
        return sum(layer not in each for layer in self._span(count) for each in skipped) / 2

    def stores(self, count: int) -> frozenset[int]:
        """Return the layers of such a model in which a pass leaves keys and values."""
        return frozenset(self._span(count)) - self.skip_attention

    def _span(self, count: int) -> range:
        """Return the layers of such a model between the ends of a pass."""
        return range(self.first, count if self.last is None else self.last)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Provisional tokens that a pass appends to a sequence's KV cache, in a round.

    Attributes:
        tokens: ``[n]`` long.
        depth: ``[n]`` long, positions behind the newest committed token's.
        mask: ``[n, P + n]`` bool, which provisional tokens (itself among them) each one attends
            to, in the order in which they were appended; None: to all. All attend to the committed
            text.
        states: ``[n, H]``, what ``LayerPlan.first`` reads, where that is not the first layer.
    """

    tokens: Tensor
    depth: Tensor
    mask: Tensor | None = None
    states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LowerLayers:
    """What has been run of trees already: the target's first layers.

    Attributes:
        count: how many layers; keys and values of these are in the KV cache, provisionally.
        states: of every tree ``[n, H]``, what the next layer reads of its nodes.
        slots: of every tree the provisional position of each node, counted from the end of the
            committed text.
    """

    count: int
    states: Sequence[Tensor]
    slots: Sequence[Sequence[int]]


class TargetLayers(Protocol):
    """The target's layers over draft tokens, on the KV cache of the sequences in use.

    What is appended is provisional: verification begins where the committed text ends, and writes
    keys and values of every layer anew, or of those behind ``Drafter.lower_layers``.
    """

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append tokens to the sequences of some places, in one pass.

        Returns:
            Of each place the hidden states ``[n, H]`` where the plan ends.
        """
        ...


@runtime_checkable
class RunsTarget(Protocol):
    """What drafts with the target's layers: a drafter, or its places for several sequences."""

    def attach(self, layers: TargetLayers) -> None:
        """Take the layers, over the KV caches of its places."""
        ...
