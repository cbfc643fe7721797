"""Documents packed into sequences of one length, several to a sequence, and batches of them.

Shapes: N sequences, B batch, T tokens of a sequence.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from falcon_lab.data.encoding import Encoded, chunks


class Batch(NamedTuple):
    """Packed sequences (a named tuple, so that Lightning moves it between devices).

    Attributes:
        tokens: ``[B, T]`` long.
        loss_mask: ``[B, T]`` bool; whether token t counts in the loss (assistant tokens of a chat,
            every token of a text; never padding).
        documents: ``[B, T]`` long, document of each token; padding is -1.
        positions: ``[B, T]`` long, position in the document, 0-based.
        index: 0-d long, the optimiser-independent number of this batch in the run; seeds whatever
            is random about it.
        features: ``[B, T, H]`` teacher features from a feature store, or None.
        argmax: ``[B, T]`` long, the target's most likely token after each position whose next token
            counts in the loss, from a feature store; or None.
        taps: ``[B, T, L, H]`` hidden states of the layers that the drafter reads, from a feature
            store; or None.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    index: Tensor  # type: ignore[assignment]  # tuple.index is not wanted here
    features: Tensor | None = None
    argmax: Tensor | None = None
    taps: Tensor | None = None


PADDING = -1
"""Document of a padding token."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """N sequences of packed documents.

    Attributes:
        tokens: ``[N, T]`` int32; padding is 0.
        loss_mask: ``[N, T]`` bool, false on padding.
        documents: ``[N, T]`` int32, number of the document in its sequence; padding is -1.
        positions: ``[N, T]`` int32, position in the document; 0 on padding.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Return T, the tokens of a sequence."""
        return self.tokens.shape[1]

    @property
    def filled(self) -> float:
        """Return the share of the tokens that are no padding."""
        return float((self.documents != PADDING).double().mean())

    def take(self, count: int) -> PackedSequences:
        """Return the first ``count`` sequences."""
        return PackedSequences(*(getattr(self, name)[:count].clone() for name in self.__slots__))

    def fingerprint(self) -> str:
        """Return sixteen hex digits that change with any token, mask, document or position."""
        whole = hashlib.sha256(str(tuple(self.tokens.shape)).encode())
        for name in self.__slots__:
            whole.update(getattr(self, name).contiguous().numpy().tobytes())
        return whole.hexdigest()[:16]


def pack(documents: Iterable[Encoded], length: int) -> PackedSequences:
    """Pack documents into sequences of ``length`` tokens.

    Documents longer than a sequence are cut into pieces, each a document of its own. The longest
    pieces come first and each goes where it leaves the least room (best fit decreasing), so that
    the same documents in the same order always give the same sequences.
    """
    pieces = [piece for document in documents for piece in chunks(document, length)]
    order = sorted(range(len(pieces)), key=lambda number: -len(pieces[number]))
    chosen = _best_fit(pieces, order, length)
    return _filled([[pieces[number] for number in sequence] for sequence in chosen], length)


def _best_fit(pieces: Sequence[Encoded], order: Iterable[int], length: int) -> list[list[int]]:
    """Return which pieces are in which sequence."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, sequence), sorted
    for number in order:
        size = len(pieces[number])
        place = bisect_left(room, (size, -1))
        if place < len(room):
            free, sequence = room.pop(place)
        else:
            free, sequence = length, len(sequences)
            sequences.append([])
        sequences[sequence].append(number)
        if free > size:
            insort(room, (free - size, sequence))
    return sequences


def _filled(sequences: Sequence[Sequence[Encoded]], length: int) -> PackedSequences:
    shape = (len(sequences), length)
    packed = PackedSequences(
        tokens=torch.zeros(shape, dtype=torch.int32),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        documents=torch.full(shape, PADDING, dtype=torch.int32),
        positions=torch.zeros(shape, dtype=torch.int32),
    )
    for number, sequence in enumerate(sequences):
        start = 0
        for document, piece in enumerate(sequence):
            here = slice(start, start + len(piece))
            packed.tokens[number, here] = torch.tensor(piece.tokens, dtype=torch.int32)
            packed.loss_mask[number, here] = torch.tensor(piece.loss_mask)
            packed.documents[number, here] = document
            packed.positions[number, here] = torch.arange(len(piece), dtype=torch.int32)
            start += len(piece)
    return packed
