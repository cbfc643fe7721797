"""Speculative sampling (arXiv 2211.17192 and 2302.01318): a small language model drafts.

Shapes: B batch, T rows, F frontier blocks, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor

from falcon_lab.drafters.model_passes import ModelPasses
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    Announce,
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    PassCompiler,
    Prediction,
    Recorder,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.compiled import compile_ahead
from falcon_lab.model.masks import packed_mask
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafting import Drafting
from falcon_lab_sps.small_model import small_model


class SpsDrafter(TrainableDrafter):
    """A small causal language model with a cache of its own; it reads tokens alone.

    A fresh model is trained on rows x_{t+1}, as every drafter is, so the first token of a text is
    never among its inputs, in training or in decoding. One that was there before has learnt to
    begin with it, and does.

    Args:
        config: which model.
        context: gives the target.

    Attributes:
        block: 1.
        needs: nothing of the target.
        model: the small model.
        passes: what drafting computes with.
    """

    block = 1
    needs: frozenset[str] = frozenset()

    def __init__(self, config: SpsConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.host: Any = context.host
        self.model = small_model(config, context.host)
        self._first = 1 if config.model is None else 0  # position of the first row
        model = self.model
        self.passes = ModelPasses(model.backbone, model.logits, model.max_positions)
        self._drafting = Drafting(model, self.passes, self._first)

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Row t has read x_{t+1} and predicts what follows it, ``[B, T, V]`` logits.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        if reveal is not None:
            raise FalconLabError(
                "drafter sps predicts one token a pass, and has no block of which a part could be "
                "shown; set glancing.name=none"
            )
        tokens = inputs.tokens
        hidden = self.model(
            tokens=tokens, positions=inputs.positions + 1, mask=packed_mask(inputs.documents)
        )
        column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return Prediction(
            features=None,
            logits=self.model.logits(hidden),
            label=column + 1,
            source=column,
            slot=torch.zeros_like(column),
            group=column,
        )

    # --- drafting ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        self._drafting = Drafting(self.model, self.passes, self._first)
        if not self._first:
            self._drafting.observe(first.reshape(1), 0)

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Memory of the small model's keys and values for such a text."""
        return self.passes.kv_bytes(self._rows(positions, tree))

    @property
    def kv_allocated(self) -> int:
        """Memory that is taken already, and that the next text takes over."""
        return self.passes.kv_allocated

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Take that memory when the first row is computed, and no more later."""
        self._drafting.expect(self._rows(positions, tree))

    def _rows(self, positions: int, tree: TreeBuilder) -> int:
        """Rows of a text, and of a round's blocks: at most one a node in every pass."""
        return positions + tree.max_depth * tree.max_nodes

    def observe(self, observation: Observation) -> None:
        """Append tokens; the next ``draft`` reads them, or a prompt's part is read at once."""
        with torch.no_grad():
            self._drafting.observe(observation.tokens, observation.remaining)

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """``[F, 1, V]``: what follows the newest token (the root), or F nodes; no rows beyond the
        positions that the small model was made for."""
        root = frontier.tokens.shape[1] == 0
        logits = self._drafting.root() if root else self._drafting.blocks(frontier)
        if logits is None:
            blocks, device = frontier.tokens.shape[0], frontier.tokens.device
            return DraftOutput(torch.empty(blocks, 0, self.host.vocab_size, device=device))
        return DraftOutput(logits, all_proposed=True)

    # --- compiled passes ----------------------------------------------------------------------

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """As ``Drafter.compiled``. Prompts go through the modules."""
        other = copy.copy(self)
        other.passes = self.passes.compiled(announce, compiler or compile_ahead, recorder)
        other._drafting = Drafting(self.model, other.passes, self._first)
        return other

    @property
    def is_compiled(self) -> bool:
        """Whether the small model's passes are compiled."""
        return self.passes.is_compiled

    def prepare(self, longest: int) -> None:
        """As ``Drafter.prepare``."""
        self.passes.prepare(longest)
