"""Medusa's heads (arXiv 2401.10774, §2.1): each guesses one more token from the newest feature.

h_t is what the target's LM head reads to draw x_{t+1}, the root of the next tree. Head j, from 1
on, reads the same h_t and says what comes j tokens after the root: x_{t+1+j}.

Shapes: B batch, T tokens, n heads (the block k), r rows, F frontier blocks, H hidden, V vocabulary
(the draft vocabulary, where there is one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.drafters.compiled_passes import CompilablePasses
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Outputs,
    Prediction,
    Reveal,
    TrainableDrafter,
)
from falcon_lab.model.passes import EagerPass, Forward, ForwardPass, Inputs, NewPositions, PassMaker
from falcon_lab_medusa import MedusaConfig


class ResBlock(nn.Module):
    """x + SiLU(W·x + b) with W and b of zero at the start, so that it begins as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[..., H]`` to ``[..., H]``."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaDrafter(CompilablePasses, TrainableDrafter):
    """n heads, each of its own residual layers and, with ``head: own``, output layer.

    Attributes:
        block: n.
        needs: target features.
        max_passes: one; below its block it has nothing to say.
    """

    needs = frozenset({"features"})
    max_passes = 1
    _newest: Tensor | None  # [H], h_t

    def __init__(self, config: MedusaConfig, context: BuildContext) -> None:
        super().__init__()
        self.block = config.block
        self.host: Any = context.host
        own = config.head == "own"
        words = context.draft_vocabulary(config.draft_vocabulary, own_head=own)
        self.draft_vocabulary = words
        hidden = self.host.hidden_size
        # One by one: a list that is multiplied would hold one module many times.
        self.trunks = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden) for _ in range(config.layers)))
            for _ in range(config.block)
        )
        heads = config.block if own else 0
        self.heads = nn.ModuleList(self._words.copy_head() for _ in range(heads))
        self.draft_through(EagerPass)

    @property
    def _words(self) -> Any:
        """Return what has the LM head: the draft vocabulary, or the target."""
        return self.draft_vocabulary or self.host

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict n rows for every input. A head reads no token, so there is nothing to reveal."""
        hidden = self._trunk(inputs.features)  # [B, T, n, H]
        batch, tokens = inputs.tokens.shape
        slot = torch.arange(self.block, device=hidden.device).repeat(tokens)
        source = torch.arange(tokens, device=hidden.device).repeat_interleave(self.block)
        own, flat = bool(self.heads), hidden.flatten(1, 2)
        return Prediction(
            features=None if own else flat,
            logits=None,
            label=(source + 1 + slot).expand(batch, -1),
            source=source.expand(batch, -1),
            slot=slot.expand(batch, -1),
            group=source.expand(batch, -1),
            head=self._own_logits if own else None,
            hidden=flat if own else None,
        )

    def _trunk(self, features: Tensor) -> Tensor:
        """Map features ``[..., H]`` to every head's hidden states, ``[..., n, H]``."""
        features = features.to(next(self.trunks.parameters()).dtype)
        return torch.stack([trunk(features) for trunk in self.trunks], dim=-2)

    def _own_logits(self, features: Tensor, slot: Tensor) -> Tensor:
        """Return the logits ``[r, V]`` of ``[r, H]``, each by its head ``slot`` ``[r]``."""
        order = slot.argsort(stable=True)
        parts = torch.split(features[order], torch.bincount(slot, minlength=self.block).tolist())
        logits = torch.cat([head(part) for head, part in zip(self.heads, parts, strict=True)])
        return logits[order.argsort()]

    # --- drafting ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Forget the sequence."""
        self._newest = None

    def observe(self, observation: Observation) -> None:
        """Only the newest feature counts."""
        assert observation.features is not None
        self._newest = observation.features[-1]

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Draft with all heads in one pass for the root, and nothing below it."""
        if frontier.tokens.shape[1]:
            return DraftOutput.nothing(frontier, self.host.vocab_size, self.draft_vocabulary)
        if self._newest is None:
            raise RuntimeError("draft() needs an observed position: call observe() first")
        logits, hidden = self._pass([self._newest])
        words = self.draft_vocabulary
        return DraftOutput(logits[None], hidden[None], all_proposed=True, vocabulary=words)

    def guess(self, newest: Tensor) -> tuple[Tensor, Tensor]:
        """``[H]``, h_t -> logits ``[n, V]`` and what they are made of, ``[n, H]``."""
        hidden = self._trunk(newest)
        if self.heads:
            logits = torch.stack([head(row) for head, row in zip(self.heads, hidden, strict=True)])
        else:
            logits = self._words.head(hidden.to(newest.dtype))
        return logits, hidden

    def draft_through(self, make: PassMaker) -> None:
        """Draft through a pass that ``make`` makes of all heads together."""
        self._newest = None
        self._pass = make(MedusaForward(self))

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """Return the one pass; it is the same however many tokens there are."""
        return (self._pass,)


class MedusaForward(Forward):
    """All heads at once, as ``MedusaDrafter.guess``."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        super().__init__("drafter")
        self.drafter = drafter

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Compute logits ``[n, V]`` and hidden states ``[n, H]`` from ``[H]``."""
        return self.drafter.guess(inputs[0])

    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield one: its shape is always the same."""
        host = self.drafter.host
        yield [torch.zeros(host.hidden_size, dtype=host.dtype, device=host.device)]
