"""A drafter without memory: an MLP from (next token, feature) to the next feature.

Shapes: B batch, T rows, F frontier blocks, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import (
    BuildContext,
    Drafter,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
)
from falcon_lab_sample import MlpConfig


class MlpDrafter(nn.Module, Drafter):
    """Predicts h_{t+1} from the embedding of x_{t+1} and h_t."""

    block = 1
    needs = frozenset({"features"})

    def __init__(self, config: MlpConfig, context: BuildContext) -> None:
        super().__init__()
        self.host = context.host
        hidden = self.host.hidden_size
        self.layers = nn.Sequential(
            nn.Linear(2 * hidden, config.width * hidden),
            nn.SiLU(),
            nn.Linear(config.width * hidden, hidden),
        )
        self._newest: tuple[Tensor, Tensor] | None = None  # token, feature
        self._features = torch.empty(0)  # [F, H] of the last pass

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """One row for each input row. With k = 1 a block has no earlier row to reveal."""
        row = torch.arange(inputs.tokens.shape[1], device=inputs.tokens.device)
        row = row.expand_as(inputs.tokens)
        return Prediction(
            features=self._next(inputs.tokens, inputs.features),
            logits=None,
            label=row + 1,
            source=row,
            slot=torch.zeros_like(row),
            group=row,
        )

    def reset(self, first: Tensor) -> None:
        """Forget the sequence."""
        self._newest = None

    def observe(self, observation: Observation) -> None:
        """Only the newest row counts."""
        assert observation.features is not None
        self._newest = observation.tokens[-1:], observation.features[-1:]

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """From the newest row, or from draft tokens with the features predicted above them."""
        if frontier.tokens.shape[1] == 0:
            assert self._newest is not None
            tokens, features = self._newest
        else:
            tokens, features = frontier.tokens[:, 0], self._features[frontier.parents]
        self._features = self._next(tokens, features)
        logits = self.host.head(self._features)
        return DraftOutput(logits[:, None], self._features[:, None])

    def _next(self, tokens: Tensor, features: Tensor) -> Tensor:
        """``[...]`` tokens and ``[..., H]`` features -> ``[..., H]``, as a step from h_t."""
        embedded = self.host.embed(tokens)
        step: Tensor = self.layers(torch.cat((embedded, features.to(embedded.dtype)), dim=-1))
        return features + step
