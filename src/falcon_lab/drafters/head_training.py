"""The first pass of training a head: every row of a batch predicts, as a round's first pass does.

Shapes: B batch, T rows, A anchors, R prediction rows, M layers of an LSTM, k block, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.relaxed_mask import (
    Blocks,
    Runs,
    divide,
    find_anchors,
    query_mask,
    relaxed_causal_mask,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import DrafterInputs, Prediction, Reveal

if TYPE_CHECKING:
    from falcon_lab.drafters.feature_head import FeatureHead
    from falcon_lab.drafters.unrolling import KeptRows


class Rows(NamedTuple):
    """What R prediction rows are about, ``[B, R]`` long each: as in ``Prediction``."""

    label: Tensor
    source: Tensor
    slot: Tensor
    group: Tensor


@dataclass(frozen=True, slots=True)
class FirstPass:
    """A prediction, and what a later pass continues from.

    Attributes:
        prediction: of R rows.
        hidden: ``[B, R, H]``, what the decoder blocks put out for them.
        runs: the documents.
        blocks: of the T rows.
        state: after every row, ``[M, B, T, H]`` each; None where nothing is remembered, or nobody
            goes on.
    """

    prediction: Prediction
    hidden: Tensor
    runs: Runs
    blocks: Blocks
    state: State | None


def first_pass(
    head: FeatureHead,
    inputs: DrafterInputs,
    runs: Runs,
    phase: Tensor,
    reveal: Reveal | None = None,
    kept: KeptRows | None = None,
) -> FirstPass:
    """Predict every row.

    Args:
        head: what predicts.
        inputs: packed documents.
        runs: where each of them is.
        phase: ``[B, T]`` long, constant in a document.
        reveal: labels that are shown.
        kept: takes the keys and values of the T rows, for later passes.

    Raises:
        FalconLabError: labels are to be shown to a head that reads no features.
    """
    if reveal is not None and inputs.taps is not None:
        raise FalconLabError(
            f"a glance shows the target's features, and {type(head).__name__} reads hidden states "
            "of its layers; set glancing.name=none"
        )
    blocks = divide(runs, inputs.positions, phase, head.block)
    rows = _Batch(head, inputs, runs, blocks, kept)
    return rows.by_blocks(reveal) if head.offsets is None else rows.by_queries(reveal)


@dataclass(frozen=True, slots=True)
class _Batch:
    head: FeatureHead
    inputs: DrafterInputs
    runs: Runs
    blocks: Blocks
    kept: KeptRows | None

    def by_blocks(self, reveal: Reveal | None) -> FirstPass:
        """The last k rows predict."""
        block, inputs = self.head.block, self.inputs
        tokens, features = inputs.tokens, self.head.read(inputs.features, inputs.taps)
        if reveal is not None:
            tokens = torch.where(reveal.mask, reveal.tokens, tokens)
            features = torch.where(
                reveal.mask.unsqueeze(-1), reveal.features.to(features.dtype), features
            )
        fused, state = self._fuse(tokens, features)
        hidden = self._run(
            embeddings=fused,
            positions=inputs.positions,
            mask=relaxed_causal_mask(self.runs, self.blocks),
        )
        column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        slot, group = self.blocks
        source = column + (block - 1 - slot)
        where = Rows(column + block, source, slot, group)
        prediction = self.head.predicted(hidden, where)
        return FirstPass(prediction, hidden, self.runs, self.blocks, state)

    def by_queries(self, reveal: Reveal | None) -> FirstPass:
        """The newest row of every block is asked k times."""
        head, block, inputs = self.head, self.head.block, self.inputs
        assert head.offsets is not None
        anchors = find_anchors(self.blocks, block)
        features = head.read(inputs.features, inputs.taps)
        context, state = self._fuse(inputs.tokens, features)
        anchor = anchors.column.repeat_interleave(block, dim=1)  # [B, R]
        slot = torch.arange(block, device=anchor.device).repeat(anchors.column.shape[1])
        rows = context.gather(1, anchor.unsqueeze(-1).expand(-1, -1, context.shape[-1]))
        rows = rows + head.offsets[slot]
        positions = inputs.positions.gather(1, anchor)
        if reveal is not None:
            rows = torch.where(reveal.mask.unsqueeze(-1), self._fuse_revealed(reveal), rows)
            # A revealed row stands where the row with this input really is.
            there = (positions + slot + 1).clamp_max(head.host.max_positions - 1)
            positions = torch.where(reveal.mask, there, positions)
        hidden = self._run(
            embeddings=torch.cat([context, rows], dim=1),
            positions=torch.cat([inputs.positions, positions], dim=1),
            mask=query_mask(self.runs, anchors, block),
        )[:, inputs.tokens.shape[1] :]
        present = anchors.present.repeat_interleave(block, dim=1)
        group = torch.arange(anchor.shape[1], device=anchor.device) // block
        where = Rows(
            label=torch.where(present, anchor + 1 + slot, -1),
            source=anchor,
            slot=slot.expand_as(anchor),
            group=group.expand_as(anchor),
        )
        prediction = head.predicted(hidden, where)
        return FirstPass(prediction, hidden, self.runs, self.blocks, state)

    def _run(self, **rows: Any) -> Tensor:
        if self.kept is None:
            return self.head.train_blocks(**rows)
        hidden = self.head.train_blocks(**rows, cache=self.kept)
        self.kept.keep(self.inputs.tokens.shape[1])
        return hidden

    def _fuse(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, State | None]:
        rows = self.head.join(tokens, features)
        if self.kept is None:
            return self.head.fuse.packed(rows, self.runs), None
        return self.head.fuse.packed_with_states(rows, self.runs)

    def _fuse_revealed(self, reveal: Reveal) -> Tensor:
        # The LSTM state at an anchor is not to be had from one pass over the document, so the
        # revealed rows of an anchor run through it as a short document of their own.
        # A row that is not revealed has nothing to tell to those behind it.
        rows = self.head.join(reveal.tokens, reveal.features) * reveal.mask.unsqueeze(-1)
        short = rows.reshape(-1, self.head.block, rows.shape[-1])
        fused: Tensor = self.head.fuse(short)[0]
        return fused.reshape(*rows.shape[:-1], -1)
