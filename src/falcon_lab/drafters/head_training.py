"""The first pass of training a head: every row of a batch predicts, as a round's first pass does.

Shapes: B batch, T rows, A anchors, R prediction rows, M layers of an LSTM, k block, H hidden.

Training passes after the first: a head goes on from its own predictions, as it does in drafting.

Every block of the first pass begins a branch: k true tokens beside the k features that the head has
just predicted, on the state at the block's end, seeing the true rows up to there and the branch's
own blocks. What comes out is what a drafting pass over the true tokens would predict. EAGLE-3 calls
it training-time test (arXiv 2503.01840, §3.2); here it is any head's.

Shapes: B batch, T rows, A anchors (newest rows of blocks), R = A·k prediction rows, M layers of an
LSTM, W channels of a fused row, k block, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_layers import HeadLayers, Rows
from falcon_lab.drafters.relaxed_mask import (
    Blocks,
    Runs,
    divide,
    find_anchors,
    query_mask,
    relaxed_causal_mask,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Prediction, Reveal


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
    head: HeadLayers,
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
    head: HeadLayers
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


def unrolled(
    head: HeadLayers,
    inputs: DrafterInputs,
    runs: Runs,
    phase: Tensor,
    reveal: Reveal | None = None,
) -> Iterator[Prediction]:
    """The predictions of a round's passes, one after the other, without end.

    A block whose rows are not all there (at a document's beginning) begins no branch.

    Args:
        head: what predicts.
        inputs: packed documents.
        runs: where each of them is.
        phase: ``[B, T]`` long, constant in a document.
        reveal: labels that the first pass is shown.
    """
    kept = KeptRows()
    first = first_pass(head, inputs, runs, phase, reveal, kept)
    yield first.prediction
    branches = Branches(head, inputs, first, kept)
    while True:
        yield branches.go_on()


class KeptRows(Cache):
    """Keys and values of earlier passes, through which gradients flow."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's new rows; all its rows."""
        new = key_states, value_states
        if layer_idx in self._rows:
            keys, values = self._rows[layer_idx]
            new = torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)
        self._rows[layer_idx] = new
        return new

    def keep(self, rows: int) -> None:
        """Keep the first ``rows`` after a pass; what comes behind them was asked, never seen."""
        self._rows = {n: (k[:, :, :rows], v[:, :, :rows]) for n, (k, v) in self._rows.items()}
        self.length = rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As ``length``."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a query of that length sees, and their offset."""
        return self.length + query_length, 0


class Branches:
    """One branch for every block of a first pass, all of them equally long.

    Args:
        head: what predicts.
        inputs: of the first pass.
        first: that pass.
        kept: its keys and values.
    """

    def __init__(
        self, head: HeadLayers, inputs: DrafterInputs, first: FirstPass, kept: KeptRows
    ) -> None:
        block = head.block
        self._head, self._inputs, self._kept = head, inputs, kept
        anchors = find_anchors(first.blocks, block)
        whole = first.runs.offset.gather(1, anchors.column) >= block - 1
        self._whole = (anchors.present & whole).repeat_interleave(block, dim=1)  # [B, R]
        self._anchor = anchors.column.repeat_interleave(block, dim=1)
        count = anchors.column.shape[1]
        self._slot = torch.arange(block, device=self._anchor.device).repeat(count)
        owner = torch.arange(count * block, device=self._anchor.device) // block
        self._group = owner.expand_as(self._anchor)
        self._own = owner.unsqueeze(1) == owner  # [R, R]
        self._context = self._true_rows(first)
        self._hidden = first.hidden
        if head.offsets is None:  # rows of the batch -> rows of blocks
            rows = (self._anchor - (block - 1) + self._slot).clamp_min(0)
            self._hidden = _gathered(first.hidden, rows)
        self._state = None if first.state is None else self._at_anchors(first.state, anchors.column)
        self._passes = 0

    def go_on(self) -> Prediction:
        """The next pass."""
        head, block, inputs = self._head, self._head.block, self._inputs
        ahead = 1 + self._passes * block + self._slot  # [R], behind the anchor
        column = (self._anchor + ahead).clamp_max(inputs.tokens.shape[1] - 1)
        rows = head.join(inputs.tokens.gather(1, column), self._hidden)
        alone = rows.reshape(-1, block, rows.shape[-1])
        fused, self._state = head.fuse(alone, self._state)
        positions = inputs.positions.gather(1, self._anchor) + ahead
        self._hidden = self._run(fused, positions.clamp_max(head.host.max_positions - 1))
        self._passes += 1
        label = self._anchor + ahead + block
        where = Rows(
            label=torch.where(self._whole, label, -1),
            source=self._anchor,
            slot=self._slot.expand_as(self._anchor),
            group=self._group,
        )
        return head.predicted(self._hidden, where)

    def _run(self, fused: Tensor, positions: Tensor) -> Tensor:
        """``[B·A, k, W]`` through the decoder blocks; ``[B, R, H]``."""
        head, block, batch = self._head, self._head.block, positions.shape[0]
        rows, count = fused.reshape(batch, -1, fused.shape[-1]), positions.shape[1]
        mask = self._block_mask()
        if head.offsets is not None:  # contexts, then queries
            queries = fused[:, -1:] + head.offsets
            rows = torch.cat([rows, queries.reshape(batch, -1, fused.shape[-1])], dim=1)
            newest = positions[:, block - 1 :: block].repeat_interleave(block, dim=1)
            positions = torch.cat([positions, newest], dim=1)
        hidden = head.train_blocks(
            embeddings=rows, positions=positions, mask=mask, cache=self._kept
        )
        self._kept.keep(self._kept.length + count)
        return hidden[:, -count:]

    def _block_mask(self) -> Tensor:
        """``[B, R, S]`` (and the queries): true rows, the branch's blocks, and the block itself."""
        own = self._own.expand(self._anchor.shape[0], -1, -1)
        before = [self._context, *[own] * self._passes]
        if self._head.offsets is None:
            return torch.cat([*before, own], dim=2)
        contexts = torch.cat([*before, own.tril(), torch.zeros_like(own)], dim=2)
        return torch.cat([contexts, torch.cat([*before, own, own], dim=2)], dim=1)

    def _true_rows(self, first: FirstPass) -> Tensor:
        """``[B, R, T]``: the rows of its document up to a branch's anchor."""
        number = first.runs.number
        column = torch.arange(number.shape[1], device=number.device)
        same = number.gather(1, self._anchor).unsqueeze(2) == number.unsqueeze(1)
        return same & (column <= self._anchor.unsqueeze(2))

    def _at_anchors(self, state: State, column: Tensor) -> State:
        """``[M, B, T, H]`` each -> ``[M, B·A, H]`` each."""
        sequence = torch.arange(column.shape[0], device=column.device).unsqueeze(1)
        hidden, cell = (part[:, sequence, column].flatten(1, 2).contiguous() for part in state)
        return hidden, cell


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
