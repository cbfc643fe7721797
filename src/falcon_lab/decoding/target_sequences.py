"""The target's side of decoding: one sequence, or several in one pass.

One sequence has the target's compiled passes and CUDA graphs, and no masks for padding; that is
why it is no batch of one.

Shapes: B sequences, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.decoding.accepting import Accepted
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DraftTokens, LayerPlan, LowerLayers
from falcon_lab.model.masks import provisional_mask, send
from falcon_lab.model.passes import NewPositions
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.model.kv_cache import KVCache
    from falcon_lab.model.target import Target, TargetOutput


class TreePasses(Protocol):
    """The target's passes of rounds, over all of the sequences in use."""

    def verify(
        self, trees: Sequence[TokenTree], lower: LowerLayers | None = None
    ) -> list[TargetOutput]:
        """Read a tree for every sequence; output i is that of node i.

        Args:
            trees: one for each.
            lower: what ``run`` has read of them already; None: nothing that counts.
        """
        ...

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Commit the accepted path of every tree."""
        ...

    def layers_run(self, place: int) -> float:
        """Return how many layers the passes of the round went through that was verified last."""
        ...

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens of some sequences (``TargetLayers``)."""
        ...


class TargetSequences(TreePasses, Protocol):
    """The KV cache of the sequences in use, and the target's passes over all of them."""

    def open(self, place: int) -> KVCache:
        """Return an empty cache of one sequence, to read a prompt into."""
        ...

    def fill(self, place: int, cache: KVCache) -> None:
        """Take the sequence that was read into use, in place of the one that was there."""
        ...

    def drop(self, place: int) -> None:
        """End a sequence; the last one in use moves to its place."""
        ...

    def step(self, roots: Sequence[Tensor]) -> Tensor:
        """Read and commit a token (0-d long) of every sequence; ``[B, V]`` logits."""
        ...

    def keep(self) -> None:
        """Commit what is provisional, of sequences that are all in use."""
        ...


def target_sequences(target: Target, count: int, capacity: int) -> TargetSequences:
    """Make room for ``count`` sequences of up to ``capacity`` positions, the tree's counted."""
    make = OneSequence if count == 1 else ManySequences
    return make(target, count, capacity)


class PassesOfRound:
    """Knows which layers a round's draft tokens went through, and how many passes did.

    Args:
        layers: of the target.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._before: dict[int, list[tuple[int, LayerPlan]]] = {}  # tokens and plan, by place
        self._verified: dict[int, list[tuple[int, LayerPlan]]] = {}  # of the round that has ended
        self._first = 0  # layer that its verification began with

    def end(self, first: int = 0) -> None:
        """End a round by a verification that begins with a layer."""
        self._before, self._verified, self._first = {}, self._before, first

    def layers(self, place: int) -> float:
        """Return the layers that the passes of the round that ended last went through."""
        drafting = (plan.work(self._layers) for _, plan in self._verified.get(place, ()))
        return sum(drafting) + self._layers - self._first

    def add(self, place: int, new: DraftTokens, plan: LayerPlan) -> bool:
        """Note a pass; return whether another one of the round went another way.

        Raises:
            FalconLabError: a token attends to one that has no keys in a layer of its own.
        """
        before = self._before.setdefault(place, [])
        others = any(other != plan for _, other in before)
        if others:
            self._refuse_missing(before, new, plan)
        before.append((len(new.tokens), plan))
        return others

    def _refuse_missing(
        self, before: Sequence[tuple[int, LayerPlan]], new: DraftTokens, plan: LayerPlan
    ) -> None:
        start = 0
        for count, other in before:
            missing = sorted(plan.stores(self._layers) - other.stores(self._layers))
            slots, start = slice(start, start + count), start + count
            if missing and (new.mask is None or bool(new.mask[:, slots].any())):
                raise FalconLabError(
                    f"draft tokens attend in layer {missing[0]} to others of the round that went "
                    "through other layers, and have no keys there; a drafter must leave them out "
                    "of DraftTokens.mask, or use one LayerPlan for a round"
                )


class OneSequence:
    """A single sequence.

    Args:
        target: the model.
        count: 1.
        capacity: positions.
    """

    def __init__(self, target: Target, count: int, capacity: int) -> None:
        del count
        self._target = target
        self._cache = target.new_cache(capacity)
        self._start = 0  # committed positions
        self._passes = PassesOfRound(target.config.num_hidden_layers)

    def open(self, place: int) -> KVCache:
        """Return the cache, emptied."""
        self._cache.reset()
        return self._cache

    def fill(self, place: int, cache: KVCache) -> None:
        """Note how long the sequence is, which is there already."""
        self._start = cache.length

    def drop(self, place: int) -> None:
        """Do nothing: no other sequence follows."""

    def step(self, roots: Sequence[Tensor]) -> Tensor:
        """Read a token; ``[1, V]`` logits."""
        return self._target.step(roots[0], self._cache).logits

    def verify(
        self, trees: Sequence[TokenTree], lower: LowerLayers | None = None
    ) -> list[TargetOutput]:
        """Read a tree, in the place of what was provisional."""
        self._passes.end(0 if lower is None else lower.count)
        if lower is not None:
            self._cache.arrange((self._start,), lower.slots)
        if self._cache.length > self._start:
            self._cache.truncate(self._start)
        if lower is None:
            return [self._target.verify(trees[0], self._cache)]
        return [self._target.verify_from(lower.count, lower.states[0], trees[0], self._cache)]

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Commit a path of the tree."""
        self._cache.commit((self._start,), (accepted[0].path,), (accepted[0].nodes,))
        self._start = self._cache.length

    def layers_run(self, place: int) -> float:
        """Return the layers of the round's passes."""
        return self._passes.layers(place)

    def keep(self) -> None:
        """Commit the provisional tokens."""
        self._passes.end()
        self._start = self._cache.length

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens."""
        new = drafts[0]
        if self._passes.add(0, new, plan):
            self._cache.begin()
        inputs = new.tokens if new.states is None else new.states
        where = NewPositions(new.depth + self._start, new.mask, self._cache)
        return {0: self._target.run_part(inputs, where, plan)}


class ManySequences:
    """Sequences side by side, each with a length of its own.

    Args:
        target: the model.
        count: most of them at a time.
        capacity: positions of each.
    """

    def __init__(self, target: Target, count: int, capacity: int) -> None:
        self._target = target
        self._cache = target.new_batch_cache(count, capacity)
        self._provisional = [0] * count  # tokens of the round so far, by place
        self._passes = PassesOfRound(target.config.num_hidden_layers)

    def open(self, place: int) -> KVCache:
        """Return an empty cache whose memory is that place's."""
        return self._cache.open(place)

    def fill(self, place: int, cache: KVCache) -> None:
        """Take what was read into use."""
        self._cache.fill(place, cache.length)

    def drop(self, place: int) -> None:
        """End a sequence; the last one moves there."""
        self._cache.drop(place)

    def step(self, roots: Sequence[Tensor]) -> Tensor:
        """Read a token of every sequence."""
        output = self._target.step_batch(torch.stack(list(roots)), self._cache)
        self._cache.commit(self._cache.lengths, [(0,)] * len(roots))
        return output.logits

    def keep(self) -> None:
        """Commit the provisional tokens."""
        lengths = self._cache.lengths
        added = self._provisional[: len(lengths)]
        self._cache.commit(lengths, [range(count) for count in added])
        self._provisional = [0] * len(self._provisional)
        self._passes.end()

    def layers_run(self, place: int) -> float:
        """Return the layers of the round's passes that were for a sequence."""
        return self._passes.layers(place)

    def verify(
        self, trees: Sequence[TokenTree], lower: LowerLayers | None = None
    ) -> list[TargetOutput]:
        """Read a tree for every sequence, padded to the widest."""
        self._passes.end(0 if lower is None else lower.count)
        self._provisional = [0] * len(self._provisional)
        if lower is None:
            output = self._target.verify_batch(trees, self._cache)
        else:
            self._cache.arrange(self._cache.lengths, lower.slots)
            output = self._target.verify_batch_from(lower.count, lower.states, trees, self._cache)
        return output.split([tree.nodes for tree in trees])

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Commit a path of each tree."""
        self._cache.commit(self._cache.lengths, [one.path for one in accepted])

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens of some sequences, padded to the most."""
        for place, new in drafts.items():
            self._passes.add(place, new, plan)
        places, parts = list(drafts), list(drafts.values())
        lengths = [self._cache.lengths[place] for place in places]
        before = [self._provisional[place] for place in places]
        starts = [sum(pair) for pair in zip(lengths, before, strict=True)]
        self._cache.begin(places, starts)
        given = [new.tokens if new.states is None else new.states for new in parts]
        depth = pad_sequence([new.depth for new in parts], batch_first=True)
        hidden = self._target.run_part_batch(
            pad_sequence(given, batch_first=True),
            depth + send(lengths, depth.device)[:, None],
            provisional_mask([new.mask for new in parts], lengths, before, given),
            self._cache,
            plan,
        )
        found = {}
        for number, (place, inputs) in enumerate(zip(places, given, strict=True)):
            self._provisional[place] += len(inputs)
            found[place] = hidden[number, : len(inputs)]
        return found
