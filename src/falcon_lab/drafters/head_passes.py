"""The forward pass of a head's drafting, from tokens to logits.

Shapes: D sequences (the root's one, or F branches), L tokens of a sequence, O older tokens before
them, n = O + D·L (and queries or padding behind), N = D·k of them predict, M layers of a state,
C channels of a fused token, H hidden, V vocabulary (the head's own, where it has one), k block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from falcon_lab.drafters.fusing import State, state_of
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.interfaces import Outputs
from falcon_lab.model.kv_layout import KVLayout
from falcon_lab.model.passes import Forward, Inputs, NewPositions, Shapes, shapes_of, size_for

LONGEST = 16
"""Tokens of a sequence, and sequences, up to which a pass is compiled: a recurrence is written out
token after token."""


class HeadOutput(NamedTuple):
    """What a pass gives.

    Attributes:
        hidden: ``[N, H]``, predicted features: what is ``carried`` into the next pass.
        logits: ``[N, V]``.
        fused: ``[D, L, C]``, the tokens as they went into the decoder blocks.
        state: of the fuse after each sequence's last token, if it remembers any.
    """

    hidden: Tensor
    logits: Tensor
    fused: Tensor
    state: State | None

    @classmethod
    def of(cls, outputs: Outputs) -> HeadOutput:
        """Return the outputs of a ``HeadForward`` by their names."""
        hidden, logits, fused, *state = outputs
        return cls(hidden, logits, fused, state_of(state))


class HeadForward(Forward):
    """Fuse tokens, append them and older ones to the cache, and predict from the last N.

    Tokens are not padded for CUDA graphs: an LSTM would have to take all of them one after the
    other, and reads its weights anew for each.

    Args:
        drafter: the layers of the head.
    """

    pads_graphs = False

    def __init__(self, drafter: HeadLayers) -> None:
        super().__init__("drafter")
        self.drafter = drafter
        self._queries = drafter.offsets is not None
        self._index = torch.arange(6 * LONGEST)

    @property
    def layout(self) -> KVLayout:
        """Return that of the decoder blocks."""
        return self.drafter.backbone.layout

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Compute a ``HeadOutput`` from tokens ``[D, L]``, features ``[D, L, H]``, older tokens
        ``[O, C]`` that are fused already, and the state before each sequence if there is any.

        L may be 0. A head with queries has them behind, and at the beginning of a sequence there is
        padding behind, up to the N that predict.
        """
        tokens, features, older, *parts = inputs
        head, fused, state = self.drafter, older[None, :0], state_of(parts)
        predicting = tokens.shape[0] * head.block
        if tokens.shape[1]:
            fused, state = head.fuse(head.join(tokens, features), state)
        embeddings = fused.flatten(0, 1)
        if older.shape[0]:
            embeddings = torch.cat([older, embeddings])
        if self._queries:
            newest = fused[:, -1] if fused.shape[1] else embeddings[-1:]
            embeddings = torch.cat([embeddings, head.queries(newest).flatten(0, 1)])
        elif (missing := predicting - embeddings.shape[0]) > 0:
            embeddings = torch.cat([embeddings, embeddings.new_zeros(missing, embeddings.shape[1])])
        hidden = _decoded(head, embeddings, new)[-predicting:]
        return head.carried(hidden), head.logits(hidden), fused, *(state or ())

    def traced(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Compute a ``HeadOutput`` of padded inputs, the recurrence written out."""
        tokens, features, older, *parts, last, predicting = inputs
        head = self.drafter
        fused, state = head.fuse.until(head.join(tokens, features), state_of(parts), last)
        embeddings = torch.cat((older, fused.flatten(0, 1)))
        if self._queries:
            newest = fused.index_select(1, last)[:, 0]
            queries = head.queries(newest).flatten(0, 1).to(embeddings.dtype)
            # They follow the tokens that were given, and so what pads those is overwritten.
            room = torch.cat((embeddings, torch.zeros_like(queries)))
            embeddings = room.index_copy(0, predicting, queries[: predicting.shape[0]])
        hidden = _decoded(head, embeddings, new).index_select(0, predicting)
        return head.carried(hidden), head.logits(hidden), fused, *(state or ())

    def supports(self, inputs: Inputs) -> bool:
        """Return whether these are a round's own: new tokens behind less than a block of others."""
        (sequences, length), older, block = inputs[0].shape, inputs[2].shape[0], self.drafter.block
        whole = self._queries or older + sequences * length >= sequences * block
        return length > 0 and older < block and whole

    def count(self, shapes: Shapes) -> int:
        """Return n, and how many queries there are."""
        (sequences, length), _, (older, _), *_ = shapes
        queries = sequences * self.drafter.block if self._queries else 0
        return older + sequences * length + queries

    def padded(self, shapes: Shapes, sizes: Sequence[int]) -> Shapes:
        """Pad behind the last sequence, and behind the tokens of a single one."""
        (sequences, length), (*_, width), older, *others = shapes
        # Branches stand one below the other, so padding may only follow the last of them.
        long = length if length <= self.drafter.block else size_for(length, sizes)
        wide = size_for(sequences, sizes)
        state = [(layers, wide, size) for layers, _, size in others[:-2]]
        return (wide, long), (wide, long, width), older, *state, *others[-2:]

    def trimmed(self, outputs: Outputs, inputs: Inputs) -> Outputs:
        """Return what belongs to the tokens that were given."""
        hidden, logits, fused, *state = outputs
        sequences, length = inputs[0].shape
        return (
            hidden,
            logits,
            fused[:sequences, :length],
            *(part[:, :sequences] for part in state),
        )

    def compiles(self, inputs: Inputs) -> bool:
        """Return whether the recurrence is short enough to be written out."""
        few = self.count(shapes_of(inputs)) <= 3 * LONGEST
        return few and max(inputs[0].shape) <= LONGEST

    def with_indices(self, inputs: Inputs) -> Inputs:
        """Add the token after which the state is needed, and the positions that predict."""
        sequences, length = inputs[0].shape
        stop = self.count(shapes_of(inputs))
        predicting = self._index[stop - sequences * self.drafter.block : stop]
        return [*inputs, self._index[length - 1 : length], predicting]

    def label(self, shapes: Shapes) -> str:
        """Return the name with all sizes of the pass."""
        (wide, long), _, (older, _), *_, (predicting,) = shapes
        return f"drafter-{wide}-by-{long}-after-{older}-for-{predicting}"

    @torch.no_grad()
    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield the first passes of rounds; those of branches come when a tree asks for them."""
        drafter, width = self.drafter, self.drafter.backbone.config.hidden_size
        dtype = feature_dtype(drafter)
        for new in range(1, most + 1):
            tokens = torch.zeros(1, new, dtype=torch.long)
            features = torch.zeros(1, new, width, dtype=dtype)
            fused, state = drafter.fuse(drafter.join(tokens[:, :1], features[:, :1]), None)
            before = 0 if self._queries else max(0, drafter.block - new)
            older = fused.new_zeros(before, fused.shape[-1])
            yield [tokens, features, older, *(state or ())]


def _decoded(head: HeadLayers, embeddings: Tensor, new: NewPositions | None) -> Tensor:
    """Send ``[n, C]`` through the decoder blocks, and return their outputs."""
    assert new is not None
    positions, mask, cache = new
    hidden: Tensor = head.backbone(
        embeddings=embeddings[None],
        positions=positions[None],
        mask=None if mask is None else mask[None],
        cache=cache,
    )
    return hidden[0]


def feature_dtype(drafter: HeadLayers) -> torch.dtype:
    """Return what holds the target's features and the head's own, which take their places."""
    own = next(drafter.backbone.parameters()).dtype
    return torch.promote_types(drafter.host.dtype, own)
