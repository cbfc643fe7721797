"""Drafting with a part of the target's own layers, on the target's own KV cache.

A round's first pass reads the newest token, and later ones the expanded nodes, through the layers
of a plan (``LayerPlan``). The keys and values of the committed text are the target's own, so that
nothing is prefilled; what drafting appends is provisional, and verification writes it anew in every
layer.

Shapes: F frontier blocks, V vocabulary, H hidden.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from falcon_lab.drafters.provisional import ProvisionalTokens
from falcon_lab.interfaces import (
    Announce,
    Drafter,
    DrafterHost,
    DraftOutput,
    DraftSequences,
    DraftTokens,
    Frontier,
    LayerPlan,
    Observation,
    PassCompiler,
    Recorder,
    TargetLayers,
    TreeBuilder,
)


class SelfDrafter(Drafter):
    """A drafter whose passes are the target's, through a part of its layers.

    Attributes:
        block: 1.
        needs: nothing beside the target's KV cache.

    Args:
        host: the target.
    """

    block = 1
    needs: frozenset[str] = frozenset()

    def __init__(self, host: DrafterHost) -> None:
        self.host = host
        self._alone = SelfSequences(self, 1)

    @property
    @abstractmethod
    def plan(self) -> LayerPlan:
        """The part of the target that a pass goes through."""

    @property
    def pass_cost(self) -> float:  # type: ignore[override]
        """What a pass costs in decode steps of the target, by the weights that it reads."""
        return self.host.pass_cost(self.plan)

    def logits(self, states: Tensor) -> Tensor:
        """Turn ``[F, H]`` where the plan ends into ``[F, V]``: by the target's LM head."""
        return self.host.head(states)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy for another sequence; layers that are attached are those of this one."""
        other = copy.copy(self)
        other._alone = SelfSequences(other, 1)
        return other

    def attach(self, layers: TargetLayers) -> None:
        """Draft with these layers."""
        self._alone.attach(layers)

    def provisional(self, tree: TreeBuilder) -> int:
        """Count the root, and at most one position a node in every later pass."""
        return provisional(tree)

    def reset(self, first: Tensor) -> None:
        """Start a text, which the target alone reads."""
        self._alone.reset(0, first)

    def observe(self, observation: Observation) -> None:
        """Note the newest token."""
        self._alone.observe(0, observation)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Predict what follows the root or F nodes, ``[F, 1, V]``."""
        return self._alone.draft({0: frontier})[0]

    def sequences(self, count: int, positions: int, tree: TreeBuilder) -> DraftSequences:
        """Return places that one pass of the target drafts for."""
        return SelfSequences(self, count)

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """Return the drafter itself: its passes are compiled with the target's."""
        announce(
            f"{type(self).__name__} drafts with the target's passes: on a CPU they are compiled "
            "where the target is (decoding.compile=all)"
        )
        return self


def provisional(tree: TreeBuilder) -> int:
    """Return the most positions that passes over a round's root and expanded nodes take."""
    return 1 + max(0, tree.max_depth - 1) * (tree.max_nodes - 1)


class PartialPasses:
    """The target's passes through a part of its layers, over the draft tokens of some places.

    Args:
        count: places.
    """

    def __init__(self, count: int) -> None:
        self._layers: TargetLayers | None = None
        self._newest: list[Tensor | None] = [None] * count  # 0-d long
        self._tokens: list[ProvisionalTokens | None] = [None] * count  # of the round

    def attach(self, layers: TargetLayers) -> None:
        """Draft with these layers."""
        self._layers = layers

    def reset(self, place: int, first: Tensor) -> None:
        """Start a sequence."""
        self._newest[place] = first

    def observe(self, place: int, observation: Observation) -> None:
        """Note the newest token."""
        self._newest[place] = observation.tokens[-1]

    def move(self, source: int, goal: int) -> None:
        """Move what is known of a sequence."""
        self._newest[goal] = self._newest[source]

    @torch.no_grad()
    def run(self, frontiers: Mapping[int, Frontier], plan: LayerPlan) -> dict[int, Tensor]:
        """Make one pass of the target for all of the places; ``[F, H]`` where the plan ends."""
        if self._layers is None:
            raise RuntimeError("a drafter that runs the target is attached to it before it drafts")
        drafts = {place: self._read(place, frontier) for place, frontier in frontiers.items()}
        return self._layers.run(drafts, plan)

    def _read(self, place: int, frontier: Frontier) -> DraftTokens:
        """Return what a place's pass reads: the newest token, or the nodes of its frontier."""
        if frontier.tokens.shape[1] == 0:
            newest = self._newest[place]
            assert newest is not None
            self._tokens[place] = ProvisionalTokens(1, newest.device)
            return DraftTokens(newest.reshape(1), torch.zeros_like(newest).reshape(1))
        tokens = self._tokens[place]
        if tokens is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        mask = tokens.expand(frontier)
        given = frontier.tokens[:, 0]
        return DraftTokens(given, torch.full_like(given, tokens.depth), mask)


class SelfSequences(PartialPasses):
    """Places for sequences that a part of the target drafts for.

    Args:
        drafter: knows the plan, and makes logits.
        count: places.
    """

    def __init__(self, drafter: SelfDrafter, count: int) -> None:
        super().__init__(count)
        self._drafter = drafter

    @torch.no_grad()
    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Make one pass of the target for all of the places."""
        return {
            place: DraftOutput(self._drafter.logits(hidden)[:, None], all_proposed=True)
            for place, hidden in self.run(frontiers, self._drafter.plan).items()
        }
