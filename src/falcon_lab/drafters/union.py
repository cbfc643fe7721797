"""Several drafters as one: each knows the whole text, and drafts for a tree of its own.

``trees/union.py`` joins these trees. A part is asked for the passes of its own builder alone
(``Frontier.parts``), and every part observes all that is committed, whoever drafted it.

Shapes: N tree nodes, P auxiliary nodes, C tree nodes without these, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from falcon_lab.drafters.sequences import sequences_of
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    Acceptance,
    Announce,
    BeginsRounds,
    BuildContext,
    Drafter,
    DraftOutput,
    DraftSequences,
    Frontier,
    Observation,
    PassCompiler,
    Recorder,
    RoundContext,
    RunsTarget,
    TargetLayers,
    TreeBuilder,
    is_trainable,
)
from falcon_lab.plugins.builtins import UnionConfig
from falcon_lab.tree import AuxiliaryNodes, TokenTree


class Union(Drafter):
    """Draft with several drafters at once.

    A frontier without parts is the first one's, so that trees which know nothing of parts are
    drafted for by that one alone.

    Args:
        config: the parts' nodes.
        context: of all of them.

    Raises:
        FalconLabError: they are fewer than two.
    """

    def __init__(self, config: UnionConfig, context: BuildContext) -> None:
        if len(config.parts) < 2:
            raise FalconLabError(
                f"drafter 'union' has {len(config.parts)} parts; give it two or more: "
                "parts: [{name: saved}, {name: lookup}]"
            )
        assert context.components is not None
        parts: list[Drafter] = []
        for node in config.parts:
            part: Drafter = context.components.build("drafter", node, context)
            if isinstance(part, nn.Module):
                part.eval()
            parts.append(part)
        self._unite(parts)

    def _unite(self, parts: Sequence[Drafter]) -> None:
        self.drafters = tuple(parts)
        self.block, self.max_passes = parts[0].block, parts[0].max_passes
        self.needs = frozenset().union(*(part.needs for part in parts))
        self.taps = tuple(sorted({layer for part in parts for layer in part.taps}))
        self.max_auxiliary = sum(part.max_auxiliary for part in parts)
        if len([part for part in parts if type(part).attach is not Drafter.attach]) > 1:
            raise FalconLabError(
                "two parts of drafter 'union' draft with the target's own layers, and there is one "
                "KV cache to do it on; leave one of them out"
            )
        weighted = [part for part in parts if is_trainable(part) or part.drafters]
        self.pretrained = all(part.pretrained for part in weighted)
        self._auxiliary: list[AuxiliaryNodes | None] = []

    def attach(self, layers: TargetLayers) -> None:
        """Give the target's layers to the part that drafts with them."""
        for part in self.drafters:
            part.attach(layers)

    def provisional(self, tree: TreeBuilder) -> int:
        """Count what that part takes."""
        trees = self.trees(tree)
        return max(part.provisional(own) for part, own in zip(self.drafters, trees, strict=True))

    # --- one sequence ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a sequence in every part."""
        for part in self.drafters:
            part.reset(first)

    def begin_round(self, context: RoundContext) -> None:
        """Tell every part what the round may spend."""
        for part in self.drafters:
            part.begin_round(context)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Let every part that has a frontier make a pass."""
        return joined(
            [
                None if own is None else part.draft(own)
                for part, own in zip(self.drafters, self.frontiers(frontier), strict=True)
            ]
        )

    def frontiers(self, frontier: Frontier) -> Sequence[Frontier | None]:
        """Return what every part expands; a frontier without parts is the first one's."""
        return frontier.parts or [frontier, *[None] * (len(self.drafters) - 1)]

    def observe(self, observation: Observation) -> None:
        """Let every part observe what it needs."""
        for part in self.drafters:
            part.observe(self.for_part(part, observation))

    def for_part(self, part: Drafter, observation: Observation) -> Observation:
        """Return an observation with what one part needs of it."""
        features = observation.features if "features" in part.needs else None
        taps = observation.taps
        if part.taps != self.taps and taps is not None:
            layers = [self.taps.index(layer) for layer in part.taps]
            taps = taps[:, layers] if layers else None
        return replace(observation, features=features, taps=taps)

    # --- memory ---------------------------------------------------------------------------------

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Return the memory of all parts, each for the trees of its own builder."""
        trees = self.trees(tree)
        return sum(
            part.kv_bytes(positions, own) for part, own in zip(self.drafters, trees, strict=True)
        )

    @property
    def kv_allocated(self) -> int:
        """Bytes that the parts have allocated already."""
        return sum(part.kv_allocated for part in self.drafters)

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Prepare every part for such a sequence."""
        for part, own in zip(self.drafters, self.trees(tree), strict=True):
            part.reserve(positions, own)

    def trees(self, tree: TreeBuilder) -> Sequence[TreeBuilder]:
        """Return the builder of every part; one that is not made of builders is all parts'."""
        return tree.builders or [tree] * len(self.drafters)

    def sequences(self, count: int, positions: int, tree: TreeBuilder) -> DraftSequences:
        """Return places of all parts, each in its own way or by copies."""
        trees = self.trees(tree)
        return UnionSequences(
            self,
            [
                sequences_of(part, count, positions, own)
                for part, own in zip(self.drafters, trees, strict=True)
            ],
        )

    # --- auxiliary nodes ------------------------------------------------------------------------

    def most_auxiliary(self, tree: TreeBuilder) -> int:
        """Count those of all parts beside the tree that they share."""
        return sum(part.most_auxiliary(tree) for part in self.drafters)

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        """Return the auxiliary nodes of all parts, which do not attend to each other's."""
        self._auxiliary = [
            part.auxiliary_nodes(tree, max_depth) if part.max_auxiliary else None
            for part in self.drafters
        ]
        there = [own for own in self._auxiliary if own is not None]
        if not there:
            return None
        if len(there) == 1:
            return there[0]
        if any(own.entrance is not None for own in there):
            raise FalconLabError(
                "two parts of drafter 'union' have auxiliary nodes, and those of one enter the "
                "target at a layer in the middle; leave one of these parts out"
            )
        count = tree.parents.shape[0]
        return AuxiliaryNodes(
            torch.cat([own.tokens for own in there]),
            torch.cat([own.depth for own in there]),
            torch.cat(
                (
                    torch.cat([own.mask[:, :count] for own in there]),
                    torch.block_diag(*(own.mask[:, count:] for own in there)).bool(),
                ),
                1,
            ),
        )

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        """Give every part what the target predicts at its own auxiliary nodes."""
        drafts, first = tree.drafts, tree.parents.shape[0]
        for part, own in zip(self.drafters, self._auxiliary, strict=True):
            if own is None:
                continue
            last = first + own.tokens.shape[0]
            seen = torch.cat((logits[: drafts.nodes], logits[first:last]))
            part.observe_auxiliary(drafts.with_auxiliary(own), seen, acceptance)
            first = last

    # --- compiled passes ------------------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """Whether the passes of all parts that have weights are compiled."""
        weighted = [part for part in self.drafters if is_trainable(part) or part.drafters]
        return bool(weighted) and all(part.is_compiled for part in weighted)

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """Return a union of the parts with compiled passes."""
        other = copy.copy(self)
        other._unite([part.compiled(announce, compiler, recorder) for part in self.drafters])
        return other

    def prepare(self, longest: int) -> None:
        """Compile what every part needs now."""
        for part in self.drafters:
            part.prepare(longest)


class UnionSequences:
    """Places of a union: the same places of every part.

    Args:
        union: what they are of.
        parts: the places of each part.
    """

    def __init__(self, union: Union, parts: Sequence[DraftSequences]) -> None:
        self._union = union
        self._parts = parts

    def attach(self, layers: TargetLayers) -> None:
        """Give the target's layers to the places of the part that drafts with them."""
        for part in self._parts:
            if isinstance(part, RunsTarget):
                part.attach(layers)

    def reset(self, place: int, first: Tensor) -> None:
        """Start a sequence at that place of every part."""
        for part in self._parts:
            part.reset(place, first)

    def begin_round(self, place: int, context: RoundContext) -> None:
        """Tell the parts that ask what the round may spend."""
        for part in self._parts:
            if isinstance(part, BeginsRounds):
                part.begin_round(place, context)

    def observe(self, place: int, observation: Observation) -> None:
        """Let every part observe what it needs."""
        for drafter, part in zip(self._union.drafters, self._parts, strict=True):
            part.observe(place, self._union.for_part(drafter, observation))

    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Let every part make a pass for all places where it has a frontier."""
        found: dict[int, list[DraftOutput | None]] = {place: [] for place in frontiers}
        asked = {place: self._union.frontiers(one) for place, one in frontiers.items()}
        for number, part in enumerate(self._parts):
            of_part = {place: parts[number] for place, parts in asked.items()}
            own = {place: one for place, one in of_part.items() if one is not None}
            outputs = part.draft(own) if own else {}
            for place, of_place in found.items():
                of_place.append(outputs.get(place))
        return {place: joined(of_place) for place, of_place in found.items()}

    def move(self, source: int, goal: int) -> None:
        """Move a sequence in every part."""
        for part in self._parts:
            part.move(source, goal)


def joined(outputs: Sequence[DraftOutput | None]) -> DraftOutput:
    """Return the output of a pass of several parts, at least one of which made it.

    Whole paths are the parts' own alone: a union does not look all of its candidates up. So is a
    draft vocabulary; the union's logits are of all tokens.
    """
    first = next(output for output in outputs if output is not None)
    if first.vocabulary is not None:
        whole = first.target_logits
        first = replace(first, logits=whole, vocabulary=None, all_proposed=False)
    return replace(first, parts=tuple(outputs), paths=None)
