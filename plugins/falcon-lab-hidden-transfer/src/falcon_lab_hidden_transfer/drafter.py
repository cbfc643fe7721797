"""Hidden Transfer (arXiv 2404.12022): linear maps carry a hidden state into later positions.

At layer t of the target, the state of a token at position p becomes the states of k pseudo
positions p + 1 to p + k, one by each of k linear maps. They run through the rest of the layers
behind the token itself, and the target's own LM head says there what follows: pseudo position j
guesses the token at p + 1 + j. Every node of a token tree carries pseudo positions of its own, so
that the pass which verifies a tree also drafts the next one.

Shapes: B batch, T tokens, S trained positions of a sequence, k block, C tree nodes, P = C·k pseudo
positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.drafters.least_squares import LeastSquares, within
from falcon_lab.drafters.positions_behind import PositionsBehind
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    FirstWeights,
    Prediction,
    Reveal,
    TrainableDrafter,
)
from falcon_lab.model.masks import packed_mask, with_positions_behind
from falcon_lab.tree import Entrance
from falcon_lab_hidden_transfer import HiddenTransferConfig


class HiddenTransfer(PositionsBehind, TrainableDrafter):
    """k linear maps between hidden states of one of the target's layers.

    Attributes:
        block: k.
        taps: the layer's input, which training reads.
        maps: ``[k, H, H]``, the identity at first.

    Args:
        config: the options.
        context: gives the target.

    Raises:
        FalconLabError: the target has no such layer.
    """

    def __init__(self, config: HiddenTransferConfig, context: BuildContext) -> None:
        super().__init__()
        self.host: Any = context.host
        self.block, self._rows = config.block, config.rows
        count = self.host.config.num_hidden_layers
        layer = config.layer if config.layer is not None else max(1, 2 * count // 3)
        if layer >= count:
            raise FalconLabError(
                f"drafter.layer is {layer}, and the target has the layers 0 to {count - 1}; "
                "hidden states are carried over where at least one layer follows"
            )
        self.layer, self.taps = layer, (layer,)
        hidden = self.host.hidden_size
        self.maps = nn.Parameter(torch.eye(hidden).repeat(self.block, 1, 1))
        self.vocab_size = self.host.vocab_size

    def carried(self, states: Tensor) -> Tensor:
        """Map states ``[..., H]`` to those of the pseudo positions behind each, ``[..., k, H]``."""
        return torch.einsum("...h,koh->...ko", states.to(self.maps.dtype), self.maps)

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict k rows behind some of the positions, by the target's own upper layers.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        if reveal is not None:
            raise FalconLabError(
                "drafter hidden_transfer reads no tokens beyond the true ones, so that no label "
                "could be shown to it; set glancing.name=none"
            )
        assert inputs.taps is not None
        batch, tokens = inputs.tokens.shape
        source = self._chosen(inputs)  # [B, S]
        step = torch.arange(1, self.block + 1, device=source.device)
        states = inputs.taps[:, :, 0]
        width = states.shape[-1]
        made = self.carried(states.gather(1, source[..., None].expand(-1, -1, width)))
        positions = inputs.positions.gather(1, source)[..., None] + step
        features = self.host.run_upper(
            self.layer,
            torch.cat((states, made.flatten(1, 2).to(states.dtype)), 1),
            torch.cat((inputs.positions, positions.flatten(1)), 1),
            with_positions_behind(packed_mask(inputs.documents), source, self.block),
        )[:, tokens:]
        slot = torch.arange(self.block, device=source.device).repeat(source.shape[1])
        group = source.repeat_interleave(self.block, 1)
        return Prediction(
            features=features,
            logits=None,
            label=group + 1 + slot,
            source=group,
            slot=slot.expand(batch, -1),
            group=group,
        )

    def _chosen(self, inputs: DrafterInputs) -> Tensor:
        """Draw the positions ``[B, S]`` of every sequence that are trained, in rising order."""
        batch, tokens = inputs.tokens.shape
        if tokens <= self._rows:
            return torch.arange(tokens, device=inputs.tokens.device).expand(batch, -1)
        device = inputs.generator.device
        drawn = torch.rand(batch, tokens, generator=inputs.generator, device=device)
        chosen: Tensor = drawn.topk(self._rows).indices.sort().values
        return chosen.to(inputs.tokens.device)

    def first_weights(self) -> FirstWeights:
        """Return what solves for the maps by regression: later states of the layer on earlier."""
        return TransferWeights(self)

    # --- drafting ---------------------------------------------------------------------------

    def read_behind(self, nodes: int, most: int) -> tuple[Tensor, Entrance | None]:
        """Return no tokens, and states that are carried over from each node's own."""

        def states(below: Tensor) -> Tensor:
            return self.carried(below)[:, :most].flatten(0, 1).to(below.dtype)

        return torch.zeros(nodes * most, dtype=torch.long), Entrance(self.layer, states)


class TransferWeights(FirstWeights):
    """Sets the maps to the best linear ones between the states of true positions.

    A squared error is divided by the squared length of the state that is mapped: those of first
    tokens are many times as long as others, and would else decide alone.

    Args:
        drafter: whose maps they are.
    """

    def __init__(self, drafter: HiddenTransfer) -> None:
        self._drafter, self._sums = drafter, LeastSquares(intercept=False)

    def add(self, inputs: DrafterInputs, features: Tensor) -> None:
        """Add the positions that have k more of their document behind them."""
        assert inputs.taps is not None
        block = self._drafter.block
        chosen, states = within(inputs.documents, block), inputs.taps[:, :, 0].float()
        count = chosen.shape[1]
        later = torch.stack([states[:, j : j + count] for j in range(1, block + 1)], 2)
        mapped = states[:, :count][chosen]
        self._sums.add(mapped, later[chosen], 1 / mapped.square().sum(-1))

    def assign(self) -> int:
        """Set the maps."""
        if self._sums.count:
            maps = self._drafter.maps
            with torch.no_grad():
                solution, _ = self._sums.solve()
                maps.copy_(solution.view(-1, *maps.shape[:2]).permute(1, 2, 0))
        return self._sums.count
