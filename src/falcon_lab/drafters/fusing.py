"""Documents one behind another in lanes, for a recurrence that starts anew with each of them.

A recurrence takes its steps one by one and its sequences side by side. One sequence a document
pads all of them to the longest: three times the rows, where documents are of all lengths. In lanes
as long as the longest document nearly every row belongs to one.

Shapes: B sequences, T rows of one, D documents, N lanes, L rows of a lane, C channels.

An LSTM written out row after row, as a compiler or a graph can take it in.

Shapes: D sequences, L rows of a sequence, I input, H hidden, M layers.

How a row (token embedding, feature) becomes what decoder blocks read.

Shapes: D sequences, L rows of a sequence, B batch, T rows of packed documents, N lanes, M layers of
an LSTM, C channels of a joined row, W of a fused one, H hidden.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from falcon_lab.drafters.relaxed_mask import Runs


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the rows of a packed batch lie.

    Between two documents of a lane there is a row of neither.

    Attributes:
        place: ``[B, T]`` long, ``n·L + l`` of each row.
        count: N.
        length: L.
    """

    place: Tensor
    count: int
    length: int

    @classmethod
    def of(cls, runs: Runs) -> Self:
        """As few lanes as a greedy search finds, as long as the longest document."""
        sizes = torch.bincount(runs.number.flatten(), minlength=runs.count).tolist()
        starts, count = lay(sizes, runs.longest)
        begin = torch.tensor(starts, device=runs.number.device)
        return cls(begin[runs.number] + runs.offset, count, runs.longest)

    def spread(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, C]`` -> ``[N, L, C]``, and ``[N, L]`` bool: the places of no document."""
        flat = self.place.flatten()
        spread = rows.new_zeros(self.count * self.length, rows.shape[-1])
        spread = spread.index_copy(0, flat, rows.flatten(0, 1))
        free = torch.ones(spread.shape[0], dtype=torch.bool, device=rows.device)
        free[flat] = False
        return spread.unflatten(0, (self.count, -1)), free.view(self.count, self.length)

    def gather(self, spread: Tensor) -> Tensor:
        """``[N, L, C]`` -> ``[B, T, C]``: the inverse of ``spread``."""
        rows = spread.flatten(0, 1).index_select(0, self.place.flatten())
        return rows.unflatten(0, self.place.shape)


def lay(sizes: Sequence[int], length: int) -> tuple[list[int], int]:
    """Best fit, the largest first: where each document starts, and how many lanes there are.

    Args:
        sizes: rows of each document.
        length: of a lane, at least the largest size.

    Returns:
        ``n·length + l`` for each document, and N.
    """
    starts, count = [0] * len(sizes), 0
    room: list[tuple[int, int]] = []  # (free rows at the end, lane), sorted
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size = sizes[number]
        found = bisect_left(room, (size + 1, -1))  # a row of no document comes first
        if found < len(room):
            free, lane = room.pop(found)
            free -= 1
        else:
            free, lane, count = length, count, count + 1
        starts[number] = lane * length + length - free
        insort(room, (free - size, lane))
    return starts, count


class Unrolled(nn.Module):
    """The recurrence of an ``nn.LSTM``, and the state after any of its rows.

    Args:
        lstm: ``batch_first``; its weights are used as they are.
    """

    def __init__(self, lstm: Any) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(
        self, rows: Tensor, hidden: Tensor, cell: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Go on from a state.

        Args:
            rows: ``[D, L, I]``.
            hidden, cell: ``[M, D, H]`` each.
            last: ``[1]`` long, the row after which the state is asked for.

        Returns:
            ``[D, L, H]`` and the state, ``[M, D, H]`` each.
        """
        hiddens, cells = [], []
        for layer in range(self.lstm.num_layers):
            rows, states = self._layer(layer, rows, hidden[layer], cell[layer])
            hiddens.append(rows.index_select(1, last)[:, 0])
            cells.append(states.index_select(1, last)[:, 0])
        return rows, torch.stack(hiddens), torch.stack(cells)

    def _layer(self, layer: int, rows: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and cells of every row, ``[D, L, H]`` each."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        into, onto, *biases = (getattr(self.lstm, f"{name}_l{layer}") for name in names)
        given = functional.linear(rows, into, biases[0] + biases[1])
        outputs, states = [], []
        for row in given.unbind(1):
            gates = row + functional.linear(h, onto)
            opened, kept, new, shown = gates.chunk(4, dim=-1)
            c = kept.sigmoid() * c + opened.sigmoid() * new.tanh()
            h = shown.sigmoid() * c.tanh()
            outputs.append(h)
            states.append(c)
        return torch.stack(outputs, 1), torch.stack(states, 1)


FEW = 8
"""Rows up to which PyTorch's own LSTM is faster than oneDNN's: 0.1 ms against 0.3 ms for two
layers of width 128 and two rows; equal at 16 rows. Longer inputs and training are oneDNN's."""

CLOSED = -1e4
"""What a gate reads that is to be shut: the sigmoid of it is zero in every precision."""

State = tuple[Tensor, Tensor]
"""LSTM state (h, c), each ``[layers, D, H]``."""


def state_of(parts: Sequence[Tensor]) -> State | None:
    """The state that was handed through a pass in parts; None where there are none."""
    return (parts[0], parts[1]) if parts else None


class Fusing(nn.Module):
    """Rows ``[D, L, C]`` to ``[D, L, W]``, each by itself: as they are, unless a subclass says so.

    One that remembers earlier rows overrides all of the methods but ``until``, which serves any.
    """

    def forward(self, rows: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Fuse D sequences, each going on from its ``state`` (None: from the start).

        Returns the fused rows and the state after each sequence's last row (None for the kinds
        that remember nothing).
        """
        return rows, None

    def until(self, rows: Tensor, state: State | None, last: Tensor) -> tuple[Tensor, State | None]:
        """``forward`` as a compiler takes it in, and the state after row ``last``, ``[1]`` long.

        Without a ``state`` nothing is remembered.
        """
        if state is None:
            return self(rows, None)[0], None
        fused, states = [], []
        for row in rows.split(1, dim=1):
            one, state = self(row, state)
            assert state is not None
            fused.append(one)
            states.append(state)
        after = [torch.stack(parts).index_select(0, last)[0] for parts in zip(*states, strict=True)]
        return torch.cat(fused, 1), state_of(after)

    def padded(
        self, rows: Tensor, lengths: Sequence[int], state: State | None
    ) -> tuple[Tensor, State | None]:
        """``forward`` of sequences of so many rows each, padded behind."""
        fused: tuple[Tensor, State | None] = self(rows, state)
        return fused

    def packed(self, rows: Tensor, runs: Runs) -> Tensor:
        """``[B, T, C]`` rows of packed documents -> ``[B, T, W]``, each document from the start."""
        fused: Tensor = self(rows)[0]
        return fused

    def packed_with_states(self, rows: Tensor, runs: Runs) -> tuple[Tensor, State | None]:
        """``packed``, and the state after every row, ``[M, B, T, H]`` each."""
        return self.packed(rows, runs), None


class Fuse(Fusing):
    """Rows ``[D, L, 2H]`` to ``[D, L, H]``.

    ``lstm`` recurs over the rows of a sequence (Falcon, arXiv 2412.12639 §3.2);
    ``lstm_positionwise`` takes every row for a sequence of its own, which is what the official
    code computes (an LSTM that is not ``batch_first``, at batch size 1); ``linear`` is EAGLE's.

    Args:
        kind: ``lstm``, ``lstm_positionwise`` or ``linear``.
        hidden: H.
        layers: LSTM layers.
        dropout: between LSTM layers.
    """

    def __init__(self, kind: str, hidden: int, *, layers: int, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.hidden, self.layers = hidden, layers
        self.mix: nn.Module
        if kind == "linear":
            self.mix = nn.Linear(2 * hidden, hidden)
        else:
            between = dropout if layers > 1 else 0.0
            self.mix = nn.LSTM(2 * hidden, hidden, layers, dropout=between, batch_first=True)

    def forward(self, rows: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """As ``Fusing``."""
        rows = rows.to(next(self.mix.parameters()).dtype)
        if self.kind == "linear":
            return self.mix(rows), None
        if self.kind == "lstm_positionwise":
            alone = rows.reshape(-1, 1, rows.shape[-1])
            return self.mix(alone)[0].reshape(*rows.shape[:-1], -1), None
        if _is_short(rows):
            with _plain_kernels():
                return self.mix(rows, state)
        return self.mix(rows, state)

    def until(self, rows: Tensor, state: State | None, last: Tensor) -> tuple[Tensor, State | None]:
        """As ``Fusing``."""
        if self.kind == "linear":
            return super().until(rows, state, last)
        rows, lstm = rows.to(next(self.mix.parameters()).dtype), Unrolled(self.mix)
        if state is not None:
            fused, hidden, cell = lstm(rows, *state, last)
            return fused, (hidden, cell)
        alone = rows.reshape(-1, 1, rows.shape[-1])
        nothing = rows.new_zeros(self.layers, alone.shape[0], self.hidden)
        return lstm(alone, nothing, nothing, last * 0)[0].view(*rows.shape[:-1], -1), None

    def padded(
        self, rows: Tensor, lengths: Sequence[int], state: State | None
    ) -> tuple[Tensor, State | None]:
        """As ``Fusing``."""
        if self.kind != "lstm" or min(lengths) == max(lengths):
            return super().padded(rows, lengths, state)
        rows = rows.to(next(self.parameters()).dtype)
        packed = pack_padded_sequence(rows, torch.tensor(lengths), True, enforce_sorted=False)
        fused, state = self.mix(packed, state)
        return pad_packed_sequence(fused, batch_first=True)[0], state

    def packed(self, rows: Tensor, runs: Runs) -> Tensor:
        """As ``Fusing``."""
        if self.kind != "lstm":
            return super().packed(rows, runs)
        if rows.device.type != "cpu":
            # cuDNN wants its weights in one piece, and its sequences side by side cost little.
            return runs.pack(self(runs.unpack(rows))[0])
        lanes = Lanes.of(runs)
        return lanes.gather(self.anew(*lanes.spread(rows)))

    def packed_with_states(self, rows: Tensor, runs: Runs) -> tuple[Tensor, State | None]:
        """As ``Fusing``."""
        if self.kind != "lstm":
            return super().packed_with_states(rows, runs)
        lanes = Lanes.of(runs)
        hiddens, cells = [], []
        for fused, gates in self._layers(*lanes.spread(rows)):
            opened, kept, new, _ = gates().chunk(4, dim=-1)
            cell = running(kept.sigmoid(), opened.sigmoid() * new.tanh())
            hiddens.append(lanes.gather(fused))
            cells.append(lanes.gather(cell))
        return hiddens[-1], (torch.stack(hiddens), torch.stack(cells))

    def anew(self, rows: Tensor, free: Tensor) -> Tensor:
        """Fuse sequences in which documents follow each other, with a fresh state for each.

        A row of no document closes the input and the forget gate through one more input channel,
        which leaves a state of zero behind it, exactly, and no gradient: the kernels are the usual.

        Args:
            rows: ``[D, L, 2H]`` of kind ``lstm``, zero where free.
            free: ``[D, L]`` bool, rows of no document; one at least between two documents.
        """
        for fused, _ in self._layers(rows, free):
            rows = fused
        return rows

    def _layers(self, rows: Tensor, free: Tensor) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Each layer's rows ``[N, L, H]``, and what computes its gates anew, ``[N, L, 4·H]``."""
        lstm: Any = self.mix
        rows = rows.to(lstm.weight_ih_l0.dtype)
        closing = free.unsqueeze(-1).to(rows)
        for layer in range(lstm.num_layers):
            if layer:
                rows = functional.dropout(rows, lstm.dropout, self.training)
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            into, *others = (getattr(lstm, f"{name}_l{layer}") for name in names)
            gates = into.new_zeros(4, lstm.hidden_size)  # input, forget, cell, output
            gates[:2] = CLOSED
            weights = [torch.cat([into, gates.view(-1, 1)], dim=1), *others]
            start = [rows.new_zeros(1, rows.shape[0], lstm.hidden_size)] * 2
            given = torch.cat([rows, closing], dim=-1)
            settings = (True, 1, 0.0, self.training, False, True)
            rows = torch.lstm(given, start, weights, *settings)[0]
            yield rows, partial(_gates, given, rows, weights)


def _gates(given: Tensor, outputs: Tensor, weights: list[Tensor]) -> Tensor:
    """A layer's gates, of which the kernels keep nothing: what it read is known by now."""
    into, onto, *biases = weights
    before = functional.pad(outputs, (0, 0, 1, -1))
    return functional.linear(given, into, biases[0] + biases[1]) + functional.linear(before, onto)


def running(kept: Tensor, new: Tensor) -> Tensor:
    """The cells ``c_t = kept_t · c_{t-1} + new_t`` of all rows ``[N, L, H]``, from zero.

    In log L steps over all rows (Hillis and Steele's scan), each of products of numbers below 1.
    """
    step = 1
    while step < kept.shape[1]:
        new = new + kept * functional.pad(new, (0, 0, step, -step))
        kept = kept * functional.pad(kept, (0, 0, step, -step))
        step *= 2
    return new


def _is_short(rows: Tensor) -> bool:
    """Whether these are the few rows of a drafting pass on a CPU."""
    few = rows.shape[0] * rows.shape[1] <= FEW
    return few and rows.device.type == "cpu" and not torch.is_grad_enabled()


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without oneDNN, whose LSTM lays its weights out anew in every call."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
