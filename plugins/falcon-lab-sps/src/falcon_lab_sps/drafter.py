"""Speculative sampling (arXiv 2211.17192 and 2302.01318): a small language model drafts.

Shapes: B batch, T tokens, F frontier blocks, V vocabulary (the draft vocabulary, where there is
one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from falcon_lab.drafters.compiled_passes import CompilablePasses
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    DraftVocabulary,
    Frontier,
    LayerPlan,
    Observation,
    Prediction,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.masks import packed_mask
from falcon_lab.model.passes import EagerPass, ForwardPass, PassMaker, TokensForward
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafting import Drafting, Way
from falcon_lab_sps.small_model import SmallModel, small_model


class DraftModel(CompilablePasses):
    """Drafts with a small causal language model, over a cache of its own; it reads tokens alone.

    Attributes:
        block: 1.
        needs: nothing of the target.
        host: the target.
        model: the small model.
        draft_vocabulary: the tokens that it has logits of; None: all.
    """

    block = 1
    needs: frozenset[str] = frozenset()
    host: Any
    model: SmallModel
    # Without a default, which would hide that of a trained one, a module of its own.
    draft_vocabulary: DraftVocabulary | None
    _first: int  # position of the first token: 1 where no text's first token is read
    _way: Way  # of committed tokens
    _drafting: Drafting

    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes from now on."""
        self._way = self._made_way(make, "drafter", LayerPlan())
        self._drafting = self._text()

    def _made_way(self, make: PassMaker, name: str, plan: LayerPlan) -> Way:
        """Return a way through the model, of passes that ``make`` makes."""
        model = self.model
        forward = TokensForward(model.backbone, model.logits, name, wide_mask=True, plan=plan)
        return Way(make(forward), plan)

    def _text(self) -> Drafting:
        """Return the side of a new text."""
        return Drafting(self.model, self._way, self._way, self._first)

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        self._drafting = self._text()
        if not self._first:
            self._drafting.observe(first.reshape(1), 0)

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Count the bytes of the draft model's KV cache for such a text."""
        return self._way.run.cache_bytes(self._positions(positions, tree))

    @property
    def kv_allocated(self) -> int:
        """Return the bytes that are allocated already, and that the next text reuses."""
        return self._way.run.reserved_bytes

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Allocate that memory when the first token is computed, and no more later."""
        self._drafting.expect(self._positions(positions, tree))

    def _positions(self, positions: int, tree: TreeBuilder) -> int:
        """Count those of a text, and of a round's blocks: at most one a node in every pass."""
        return positions + tree.max_depth * tree.max_nodes

    def observe(self, observation: Observation) -> None:
        """Append tokens; the next ``draft`` reads them, or a prompt's part is read at once."""
        with torch.no_grad():
            self._drafting.observe(observation.tokens, observation.remaining)

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Predict what follows the newest token (the root) or F nodes, ``[F, 1, V]``.

        Beyond the positions that the draft model was made for there is nothing.
        """
        root = frontier.tokens.shape[1] == 0
        logits = self._drafting.root() if root else self._drafting.blocks(frontier)
        words = self.draft_vocabulary
        if logits is None:
            return DraftOutput.nothing(frontier, self.host.vocab_size, words)
        return DraftOutput(logits, all_proposed=True, vocabulary=words)

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """Return that over committed tokens, which draft tokens go through too."""
        return (self._way.run,)


class SpsDrafter(TrainableDrafter, DraftModel):
    """A draft model that can be trained.

    A fresh model is trained on tokens x_{t+1}, as every drafter is, so the first token of a text is
    never among its inputs, in training or in decoding. One that was there before has learnt to
    begin with it, and does.

    Args:
        config: which model.
        context: gives the target.
    """

    def __init__(self, config: SpsConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.host = context.host
        words = context.draft_vocabulary(config.draft_vocabulary, own_head=True)
        self.draft_vocabulary = words
        self.model = small_model(config, context.host, None if words is None else words.ids)
        self.pretrained = config.model is not None
        self._first = 0 if self.pretrained else 1
        self.draft_through(EagerPass)

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
