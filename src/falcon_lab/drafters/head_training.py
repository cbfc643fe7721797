"""Train a head: a first pass in which every token predicts, and the passes that follow from it.

A later pass continues from the head's own predictions, as it does in drafting. Every block of the
first pass begins a branch: k true tokens beside the k features that the head has just predicted, on
the state at the block's end, attending to the true tokens up to there and the branch's own blocks.
What comes out is what a drafting pass over the true tokens would predict. EAGLE-3 calls it
training-time test (arXiv 2503.01840, §3.2); here it is any head's.

Shapes: B batch, T tokens, A anchors (newest tokens of blocks), R prediction rows (A·k, or T in a
first pass without queries), M layers of an LSTM, C channels of a fused token, k block, S keys,
H hidden.
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
    PackedDocuments,
    divide,
    find_anchors,
    itself_alone,
    query_mask,
    relaxed_causal_mask,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Prediction, Reveal


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Hold a prediction, and what a later pass continues from.

    Attributes:
        prediction: of R rows.
        carried: ``[B, R, H]``, what a later pass reads of them in place of features.
        documents: the documents.
        blocks: of the T tokens.
        state: of the fuse after every token, ``[M, B, T, H]`` each; None where it has none, or
            no pass follows.
    """

    prediction: Prediction
    carried: Tensor
    documents: PackedDocuments
    blocks: Blocks
    state: State | None


def first_pass(
    head: HeadLayers,
    inputs: DrafterInputs,
    documents: PackedDocuments,
    phase: Tensor,
    reveal: Reveal | None = None,
    cache: TrainingCache | None = None,
) -> FirstPass:
    """Predict for every token.

    Args:
        head: the layers.
        inputs: packed documents.
        documents: where each of them is.
        phase: ``[B, T]`` long, constant in a document.
        reveal: labels that are revealed.
        cache: stores the keys and values of the T tokens, for later passes.

    Raises:
        FalconLabError: labels are to be shown to a head that reads no features.
    """
    if reveal is not None and inputs.taps is not None:
        raise FalconLabError(
            f"a glance shows the target's features, and {type(head).__name__} reads hidden states "
            "of its layers; set glancing.name=none"
        )
    blocks = divide(documents, inputs.positions, phase, head.block)
    rows = _Batch(head, inputs, documents, blocks, cache)
    return rows.by_blocks(reveal) if head.offsets is None else rows.by_queries(reveal)


@dataclass(frozen=True, slots=True)
class _Batch:
    head: HeadLayers
    inputs: DrafterInputs
    documents: PackedDocuments
    blocks: Blocks
    cache: TrainingCache | None

    def by_blocks(self, reveal: Reveal | None) -> FirstPass:
        """Predict from the last k tokens of every block."""
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
            mask=relaxed_causal_mask(self.documents, self.blocks),
        )
        column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        slot, group = self.blocks
        source = column + (block - 1 - slot)
        where = Rows(column + block, source, slot, group)
        prediction, carried = self.head.predicted(hidden, where), self.head.carried(hidden)
        return FirstPass(prediction, carried, self.documents, self.blocks, state)

    def by_queries(self, reveal: Reveal | None) -> FirstPass:
        """Predict by k queries of the newest token of every block."""
        head, block, inputs = self.head, self.head.block, self.inputs
        anchors = find_anchors(self.blocks, block)
        features = head.read(inputs.features, inputs.taps)
        context, state = self._fuse(inputs.tokens, features)
        anchor = anchors.column.repeat_interleave(block, dim=1)  # [B, R]
        slot = torch.arange(block, device=anchor.device).repeat(anchors.column.shape[1])
        rows = head.queries(_gathered(context, anchors.column)).flatten(1, 2)
        positions = inputs.positions.gather(1, anchor)
        if reveal is not None:
            rows = torch.where(reveal.mask.unsqueeze(-1), self._fuse_revealed(reveal), rows)
            # A revealed row has the position of the token with this input.
            there = (positions + slot + 1).clamp_max(head.host.max_positions - 1)
            positions = torch.where(reveal.mask, there, positions)
        hidden = self._run(
            embeddings=torch.cat([context, rows], dim=1),
            positions=torch.cat([inputs.positions, positions], dim=1),
            mask=query_mask(self.documents, anchors, block, contexts=head.contexts_attend),
            read=rows.shape[1],
        )
        present = anchors.present.repeat_interleave(block, dim=1)
        group = torch.arange(anchor.shape[1], device=anchor.device) // block
        where = Rows(
            label=torch.where(present, anchor + 1 + slot, -1),
            source=anchor,
            slot=slot.expand_as(anchor),
            group=group.expand_as(anchor),
        )
        prediction, carried = head.predicted(hidden, where), head.carried(hidden)
        return FirstPass(prediction, carried, self.documents, self.blocks, state)

    def _run(self, **arguments: Any) -> Tensor:
        if self.cache is None:
            return self.head.train_blocks(**arguments)
        hidden = self.head.train_blocks(**arguments, cache=self.cache)
        self.cache.truncate(self.inputs.tokens.shape[1])
        return hidden

    def _fuse(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, State | None]:
        rows = self.head.join(tokens, features)
        if self.cache is None:
            return self.head.fuse.packed(rows, self.documents), None
        return self.head.fuse.packed_with_states(rows, self.documents)

    def _fuse_revealed(self, reveal: Reveal) -> Tensor:
        # One pass over the document does not give the LSTM state at an anchor, so the revealed rows
        # of an anchor run through the LSTM as a short document of their own. A row that is not
        # revealed contributes nothing to those behind it.
        rows = self.head.join(reveal.tokens, reveal.features) * reveal.mask.unsqueeze(-1)
        short = rows.reshape(-1, self.head.block, rows.shape[-1])
        fused: Tensor = self.head.fuse(short)[0]
        return fused.reshape(*rows.shape[:-1], -1)


def unrolled(
    head: HeadLayers,
    inputs: DrafterInputs,
    documents: PackedDocuments,
    phase: Tensor,
    reveal: Reveal | None = None,
) -> Iterator[Prediction]:
    """Yield the predictions of a round's passes, one after the other, without end.

    An incomplete block (at a document's beginning) begins no branch.

    Args:
        head: the layers.
        inputs: packed documents.
        documents: where each of them is.
        phase: ``[B, T]`` long, constant in a document.
        reveal: labels that are revealed to the first pass.
    """
    cache = TrainingCache()
    first = first_pass(head, inputs, documents, phase, reveal, cache)
    yield first.prediction
    branches = Branches(head, inputs, first, cache)
    while True:
        yield branches.advance()


class TrainingCache(Cache):
    """Hold keys and values of earlier passes, through which gradients flow."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; return all it has."""
        new = key_states, value_states
        if layer_idx in self._layers:
            keys, values = self._layers[layer_idx]
            new = torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)
        self._layers[layer_idx] = new
        return new

    def truncate(self, length: int) -> None:
        """Truncate to the first ``length`` positions after a pass, without the queries behind."""
        self._layers = {
            number: (keys[:, :, :length], values[:, :, :length])
            for number, (keys, values) in self._layers.items()
        }
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return ``length``."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys of a pass of that length, and their offset."""
        return self.length + query_length, 0


class Branches:
    """Continue a branch from every block of a first pass, all of them equally long.

    Args:
        head: the layers.
        inputs: of the first pass.
        first: that pass.
        cache: its keys and values.
    """

    def __init__(
        self, head: HeadLayers, inputs: DrafterInputs, first: FirstPass, cache: TrainingCache
    ) -> None:
        block = head.block
        self._head, self._inputs, self._cache = head, inputs, cache
        anchors = find_anchors(first.blocks, block)
        whole = first.documents.offset.gather(1, anchors.column) >= block - 1
        self._whole = (anchors.present & whole).repeat_interleave(block, dim=1)  # [B, R]
        self._anchor = anchors.column.repeat_interleave(block, dim=1)
        count = anchors.column.shape[1]
        self._slot = torch.arange(block, device=self._anchor.device).repeat(count)
        owner = torch.arange(count * block, device=self._anchor.device) // block
        self._group = owner.expand_as(self._anchor)
        self._own = owner.unsqueeze(1) == owner  # [R, R]
        self._context = self._context_mask(first)
        self._carried = first.carried
        if head.offsets is None:  # tokens of the batch -> tokens of blocks
            rows = (self._anchor - (block - 1) + self._slot).clamp_min(0)
            self._carried = _gathered(first.carried, rows)
        self._state = None if first.state is None else self._at_anchors(first.state, anchors.column)
        self._passes = 0

    def advance(self) -> Prediction:
        """Compute the next pass."""
        head, block, inputs = self._head, self._head.block, self._inputs
        ahead = 1 + self._passes * block + self._slot  # [R], behind the anchor
        column = (self._anchor + ahead).clamp_max(inputs.tokens.shape[1] - 1)
        rows = head.join(inputs.tokens.gather(1, column), self._carried)
        alone = rows.reshape(-1, block, rows.shape[-1])
        fused, self._state = head.fuse(alone, self._state)
        positions = inputs.positions.gather(1, self._anchor) + ahead
        hidden = self._run(fused, positions.clamp_max(head.host.max_positions - 1))
        self._carried = head.carried(hidden)
        self._passes += 1
        label = self._anchor + ahead + block
        where = Rows(
            label=torch.where(self._whole, label, -1),
            source=self._anchor,
            slot=self._slot.expand_as(self._anchor),
            group=self._group,
        )
        return head.predicted(hidden, where)

    def _run(self, fused: Tensor, positions: Tensor) -> Tensor:
        """Send ``[B·A, k, C]`` through the decoder blocks; return their outputs of R rows."""
        head, block, batch = self._head, self._head.block, positions.shape[0]
        rows, count = fused.reshape(batch, -1, fused.shape[-1]), positions.shape[1]
        mask = self._block_mask()
        if head.offsets is not None:  # contexts, then queries
            queries = head.queries(fused[:, -1])
            rows = torch.cat([rows, queries.reshape(batch, -1, fused.shape[-1])], dim=1)
            newest = positions[:, block - 1 :: block].repeat_interleave(block, dim=1)
            positions = torch.cat([positions, newest], dim=1)
        hidden = head.train_blocks(
            embeddings=rows, positions=positions, mask=mask, cache=self._cache, read=count
        )
        self._cache.truncate(self._cache.length + count)
        return hidden

    def _block_mask(self) -> Tensor:
        """Return ``[B, R, S]`` (and the queries): true tokens, the branch, the block itself."""
        own = self._own.expand(self._anchor.shape[0], -1, -1)
        before = [self._context, *[own] * self._passes]
        if self._head.offsets is None:
            return torch.cat([*before, own], dim=2)
        contexts = torch.cat([*before, own.tril(), torch.zeros_like(own)], dim=2)
        if not self._head.contexts_attend:
            contexts = itself_alone(contexts, contexts.shape[2] - 2 * own.shape[2])
        return torch.cat([contexts, torch.cat([*before, own, own], dim=2)], dim=1)

    def _context_mask(self, first: FirstPass) -> Tensor:
        """Return ``[B, R, T]``: the tokens of its document up to a branch's anchor."""
        number = first.documents.number
        column = torch.arange(number.shape[1], device=number.device)
        same = number.gather(1, self._anchor).unsqueeze(2) == number.unsqueeze(1)
        return same & (column <= self._anchor.unsqueeze(2))

    def _at_anchors(self, state: State, column: Tensor) -> State:
        """Pick ``[M, B·A, H]`` of each ``[M, B, T, H]``."""
        sequence = torch.arange(column.shape[0], device=column.device).unsqueeze(1)
        hidden, cell = (part[:, sequence, column].flatten(1, 2).contiguous() for part in state)
        return hidden, cell


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
