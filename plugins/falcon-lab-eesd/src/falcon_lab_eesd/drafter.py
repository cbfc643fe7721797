"""Early-exit speculative decoding: the target's first layers, trained layers, its LM head.

Row t of the trained layers (one, as a rule) reads what the target's layer N reads at token x_{t+1},
and predicts what follows that token. In training these states are tapped; in decoding the target
runs its first N layers over the draft tokens, and verification goes on from there.

Shapes: B batch, T tokens, L = 1 tapped layers, F frontier blocks, M committed positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fusing
from falcon_lab.drafters.head_drafting import Drafting
from falcon_lab.drafters.self_drafting import PartialPasses, provisional
from falcon_lab.interfaces import (
    BuildContext,
    Drafter,
    DrafterInputs,
    DraftOutput,
    DraftSequences,
    Frontier,
    LayerPlan,
    Observation,
    Prediction,
    Reveal,
    TargetLayers,
    TreeBuilder,
)
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.passes import PassMaker
from falcon_lab_eesd import EesdConfig


class EesdDrafter(FeatureHead):
    """Draft by an early exit, whose layers have a KV cache of their own over the text.

    The trained layers begin as the target's last ones and the norm behind them, where these are of
    their kind. Like that of every head, its cache begins with the second token of a text.

    Attributes:
        needs: nothing beside the tap.
        taps: what layer N reads.
        lower_layers: N, where verification goes on from there.

    Args:
        config: which layers.
        context: gives the target.

    Raises:
        ValueError: the target has too few layers.
    """

    def __init__(self, config: EesdConfig, context: BuildContext) -> None:
        host: Any = context.host
        count = host.config.num_hidden_layers
        layers = config.layers or max(1, count // 4)
        if layers >= count:
            raise ValueError(
                f"layers is {layers}, and the target has {count}; an exit is before the last layer"
            )
        self._plan = LayerPlan(last=layers)
        self._layers: TargetLayers | None = None
        blocks = Backbone.short(host.config, config.trained)
        begin_as_the_end_of(blocks, host.backbone)
        words = context.draft_vocabulary(config.draft_vocabulary)
        super().__init__(host, Fusing(), blocks, vocabulary=words)
        self.config = config
        self.needs = frozenset()
        self.taps = (layers,)
        self.lower_layers = layers if config.reuse else 0

    @property
    def pass_cost(self) -> float:  # type: ignore[override]
        """What a pass costs in decode steps: N layers, those behind of their kind, and a head."""
        count, host = self.host.config.num_hidden_layers, self.host
        head = host.pass_cost(LayerPlan.exit_after(0, count))
        layer = host.pass_cost(LayerPlan(last=1)) - head
        missing = 1 - (self.vocabulary or host).vocab_size / host.vocab_size
        below = host.pass_cost(self._plan)
        cost: float = below + self.config.trained * layer - head * missing
        return cost

    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes from now on."""
        super().draft_through(make)
        self._alone = ExitSequences(self._drafting, self._plan, 1)

    # --- the trained layer ----------------------------------------------------------------------

    def read(self, features: Tensor | None, taps: Tensor | None) -> Tensor:
        """Return the states that layer N reads, ``[..., H]``."""
        if taps is None:
            raise ValueError("eesd reads the target's hidden states in the middle: give it taps")
        return taps[..., 0, :]

    def join(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the states alone, in the layer's precision: they know their token."""
        return features.to(next(self.backbone.parameters()).dtype)

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict what follows x_{t+1} by the states there, which are tapped one row later.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        if inputs.taps is None:
            raise ValueError("eesd reads the target's hidden states in the middle: give it taps")
        later = inputs.taps.roll(-1, dims=1)  # the last row has no label
        return super().forward(replace(inputs, taps=later), reveal)

    def unroll(
        self, inputs: DrafterInputs, reveal: Reveal | None = None, phase: Tensor | None = None
    ) -> Iterator[Prediction]:
        """Refuse: a later pass reads the target's states, as the first one does."""
        return Drafter.unroll(self, inputs, reveal)

    @property
    def unrolls(self) -> bool:
        """Return that it has no passes of its own to unroll."""
        return False

    # --- drafting -------------------------------------------------------------------------------

    def attach(self, layers: TargetLayers) -> None:
        """Draft with the target's first layers, over the sequence in place 0."""
        self._layers = layers
        self._alone.attach(layers)

    def provisional(self, tree: TreeBuilder) -> int:
        """Count the root and the expanded nodes."""
        return provisional(tree)

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        super().reset(first)
        self._alone = ExitSequences(self._drafting, self._plan, 1)
        if self._layers is not None:
            self._alone.attach(self._layers)
        self._alone.reset(0, first)

    def observe(self, observation: Observation) -> None:
        """Append positions."""
        self._alone.observe(0, observation)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Predict what follows the root or F nodes, ``[F, 1, V]``."""
        return self._alone.draft({0: frontier})[0]

    def sequences(self, count: int, positions: int, tree: TreeBuilder) -> DraftSequences:
        """Return places for ``count`` sequences that share the target's passes and the layer's."""
        return ExitSequences(self.drafting(count, positions, tree), self._plan, count)


class ExitSequences:
    """Places for sequences that an early exit drafts for.

    Args:
        drafting: the trained layer's side of them.
        plan: the target's first layers.
        count: places.
    """

    def __init__(self, drafting: Drafting, plan: LayerPlan, count: int) -> None:
        self._drafting = drafting
        self._plan, self._passes = plan, PartialPasses(count)
        self._known = [1] * count  # positions of the next observation that need not be read

    def attach(self, layers: TargetLayers) -> None:
        """Draft with these layers."""
        self._passes.attach(layers)

    def reset(self, place: int, first: Tensor) -> None:
        """Start a sequence. (Its first token makes no input.)"""
        self._drafting.reset(place, first)
        self._passes.reset(place, first)
        self._known[place] = 1

    def observe(self, place: int, observation: Observation) -> None:
        """Append the states of committed positions, but for a root's that was drafted from."""
        self._passes.observe(place, observation)
        known, self._known[place] = self._known[place], 0
        if observation.taps is None:
            raise ValueError("eesd reads the target's hidden states in the middle: give it taps")
        if len(observation.tokens) > known:
            # The tokens are one ahead of the states: they are counted here, and not read.
            tokens, taps = observation.tokens[known:], observation.taps[known:]
            self._drafting.observe(place, Observation(tokens, None, observation.remaining, taps))

    def move(self, source: int, goal: int) -> None:
        """Move a sequence."""
        self._drafting.move(source, goal)
        self._passes.move(source, goal)
        self._known[goal] = self._known[source]

    @torch.no_grad()
    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Run the target's first layers over the root or the expanded nodes, and the exit."""
        states = self._passes.run(frontiers, self._plan)
        if next(iter(frontiers.values())).tokens.shape[1]:
            given = {place: one[:, None] for place, one in states.items()}
            return self._drafting.draft(frontiers, given)
        for place, root in states.items():
            token = torch.zeros(1, dtype=torch.long, device=root.device)  # counted, not read
            self._drafting.observe(place, Observation(token, None, 0, root[:, None]))
            self._known[place] = 1
        return self._drafting.draft(frontiers)


def begin_as_the_end_of(blocks: Backbone, target: Backbone) -> None:
    """Give decoder layers and their norm the weights of the target's last ones, where they fit."""
    count = len(blocks.decoder_layers)
    with torch.no_grad():
        for mine, other in zip(_end_of(blocks, count), _end_of(target, count), strict=False):
            theirs = other.state_dict()
            if _shapes(mine.state_dict()) == _shapes(theirs):
                mine.load_state_dict(theirs)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _end_of(backbone: Backbone, count: int) -> list[nn.Module]:
    """Return the final norm, and the last decoder layers before it from the last one on."""
    return [backbone.final_norm, *reversed(backbone.decoder_layers[-count:])]
