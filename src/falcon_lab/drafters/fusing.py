"""Fuse a token's embedding with its feature, linearly or by an LSTM over time, for a head's blocks.

An LSTM computes its steps one by one and its sequences in parallel. One sequence a document pads
all of them to the longest: three times the tokens, where documents are of all lengths. So on a CPU
the documents of a packed batch are laid end to end in streams as long as the longest of them, in
which nearly every token belongs to one.

Shapes: D sequences, L tokens of a sequence or a stream, B batch, T tokens of packed documents, N
streams, M layers of an LSTM, I its input, C channels of a joined token, W of a fused one, H hidden.
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

from falcon_lab.drafters.recurrence import pays, recur
from falcon_lab.drafters.relaxed_mask import PackedDocuments


@dataclass(frozen=True, slots=True)
class Streams:
    """The place of every token of a packed batch in a stream.

    Between two documents of a stream there is a gap of one step.

    Attributes:
        place: ``[B, T]`` long, ``n·L + l`` of each token.
        count: N.
        length: L.
    """

    place: Tensor
    count: int
    length: int

    @classmethod
    def of(cls, documents: PackedDocuments) -> Self:
        """Lay documents into as few streams as a greedy search finds, as long as the longest."""
        sizes = torch.bincount(documents.number.flatten(), minlength=documents.count).tolist()
        starts, count = best_fit(sizes, documents.longest)
        begin = torch.tensor(starts, device=documents.number.device)
        return cls(begin[documents.number] + documents.offset, count, documents.longest)

    def spread(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Turn ``[B, T, C]`` into ``[N, L, C]``, and return ``[N, L]`` bool: the gaps."""
        flat = self.place.flatten()
        spread = inputs.new_zeros(self.count * self.length, inputs.shape[-1])
        spread = spread.index_copy(0, flat, inputs.flatten(0, 1))
        gaps = torch.ones(spread.shape[0], dtype=torch.bool, device=inputs.device)
        gaps[flat] = False
        return spread.unflatten(0, (self.count, -1)), gaps.view(self.count, self.length)

    def gather(self, spread: Tensor) -> Tensor:
        """Turn ``[N, L, C]`` into ``[B, T, C]``: the inverse of ``spread``."""
        inputs = spread.flatten(0, 1).index_select(0, self.place.flatten())
        return inputs.unflatten(0, self.place.shape)


def best_fit(sizes: Sequence[int], length: int) -> tuple[list[int], int]:
    """Pack documents into streams by best fit, the largest first.

    Args:
        sizes: tokens of each document.
        length: of a stream, at least the largest size.

    Returns:
        Where each document starts, ``n·length + l``, and N.
    """
    starts, count = [0] * len(sizes), 0
    room: list[tuple[int, int]] = []  # (free steps at the end, stream), sorted
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size = sizes[number]
        found = bisect_left(room, (size + 1, -1))  # a gap comes first
        if found < len(room):
            free, stream = room.pop(found)
            free -= 1
        else:
            free, stream, count = length, count, count + 1
        starts[number] = stream * length + length - free
        insort(room, (free - size, stream))
    return starts, count


class Unrolled(nn.Module):
    """Write the recurrence of an ``nn.LSTM`` out step by step, as a compiler can take it in.

    Args:
        lstm: ``batch_first``; its weights are used as they are.
    """

    def __init__(self, lstm: Any) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(
        self, inputs: Tensor, hidden: Tensor, cell: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Continue from a state.

        Args:
            inputs: ``[D, L, I]``.
            hidden, cell: ``[M, D, H]`` each.
            last: ``[1]`` long, the step after which the state is returned.

        Returns:
            ``[D, L, H]`` and the state, ``[M, D, H]`` each.
        """
        hiddens, cells = [], []
        for layer in range(self.lstm.num_layers):
            inputs, states = self._layer(layer, inputs, hidden[layer], cell[layer])
            hiddens.append(inputs.index_select(1, last)[:, 0])
            cells.append(states.index_select(1, last)[:, 0])
        return inputs, torch.stack(hiddens), torch.stack(cells)

    def _layer(self, layer: int, inputs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and cells of every step, ``[D, L, H]`` each."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        into, onto, *biases = (getattr(self.lstm, f"{name}_l{layer}") for name in names)
        given = functional.linear(inputs, into, biases[0] + biases[1])
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
"""Tokens up to which PyTorch's own LSTM is faster than oneDNN's: 0.1 ms against 0.3 ms for two
layers of width 128 and two tokens; equal at 16. Longer inputs and training are oneDNN's."""

CLOSED = -1e4
"""Input of a closed gate: its sigmoid is zero in every precision."""

State = tuple[Tensor, Tensor]
"""LSTM state (h, c), each ``[layers, D, H]``."""


def state_of(parts: Sequence[Tensor]) -> State | None:
    """Join the parts of a state; None where there are none."""
    return (parts[0], parts[1]) if parts else None


class Fusing(nn.Module):
    """Turn ``[D, L, C]`` into ``[D, L, W]``: as they are, unless a subclass overrides ``forward``.

    One with a state overrides all of the methods but ``until``, which serves any.
    """

    def forward(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Fuse D sequences, each from its ``state`` on (None: from the start).

        Returns:
            The fused tokens, and the state after each sequence's last one (None where there is no
            state).
        """
        return inputs, None

    def until(
        self, inputs: Tensor, state: State | None, last: Tensor
    ) -> tuple[Tensor, State | None]:
        """Compute ``forward`` as a compiler can take it in, and the state after step ``last``.

        Args:
            inputs: ``[D, L, C]``.
            state: None for the kinds that have none.
            last: ``[1]`` long.
        """
        if state is None:
            return self(inputs, None)[0], None
        fused, states = [], []
        for row in inputs.split(1, dim=1):
            one, state = self(row, state)
            assert state is not None
            fused.append(one)
            states.append(state)
        after = [torch.stack(parts).index_select(0, last)[0] for parts in zip(*states, strict=True)]
        return torch.cat(fused, 1), state_of(after)

    def padded(
        self, inputs: Tensor, lengths: Sequence[int], state: State | None
    ) -> tuple[Tensor, State | None]:
        """Fuse sequences of ``lengths``, padded behind."""
        fused: tuple[Tensor, State | None] = self(inputs, state)
        return fused

    def packed(self, inputs: Tensor, documents: PackedDocuments) -> Tensor:
        """Fuse packed documents, each from the start: ``[B, T, C]`` -> ``[B, T, W]``."""
        fused: Tensor = self(inputs)[0]
        return fused

    def packed_with_states(
        self, inputs: Tensor, documents: PackedDocuments
    ) -> tuple[Tensor, State | None]:
        """Fuse packed documents, and return the state after every token, ``[M, B, T, H]`` each."""
        return self.packed(inputs, documents), None


class Fuse(Fusing):
    """Turn ``[D, L, 2H]`` into ``[D, L, H]``.

    ``lstm`` recurs over the tokens of a sequence (Falcon, arXiv 2412.12639 §3.2);
    ``lstm_positionwise`` treats every token as a sequence of its own, which is what the official
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

    def forward(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Fuse D sequences from ``state`` on; ``linear`` and ``lstm_positionwise`` have none."""
        inputs = inputs.to(next(self.mix.parameters()).dtype)
        if self.kind == "linear":
            return self.mix(inputs), None
        if self.kind == "lstm_positionwise":
            alone = inputs.reshape(-1, 1, inputs.shape[-1])
            return self.mix(alone)[0].reshape(*inputs.shape[:-1], -1), None
        if _is_short(inputs):
            with _plain_kernels():
                return self.mix(inputs, state)
        return self.mix(inputs, state)

    def until(
        self, inputs: Tensor, state: State | None, last: Tensor
    ) -> tuple[Tensor, State | None]:
        """Compute ``forward`` with the LSTM unrolled, and the state after step ``last``."""
        if self.kind == "linear":
            return super().until(inputs, state, last)
        inputs, lstm = inputs.to(next(self.mix.parameters()).dtype), Unrolled(self.mix)
        if state is not None:
            fused, hidden, cell = lstm(inputs, *state, last)
            return fused, (hidden, cell)
        alone = inputs.reshape(-1, 1, inputs.shape[-1])
        nothing = inputs.new_zeros(self.layers, alone.shape[0], self.hidden)
        return lstm(alone, nothing, nothing, last * 0)[0].view(*inputs.shape[:-1], -1), None

    def padded(
        self, inputs: Tensor, lengths: Sequence[int], state: State | None
    ) -> tuple[Tensor, State | None]:
        """Fuse padded sequences; the LSTM skips the padding, which its state excludes."""
        if self.kind != "lstm" or min(lengths) == max(lengths):
            return super().padded(inputs, lengths, state)
        inputs = inputs.to(next(self.parameters()).dtype)
        packed = pack_padded_sequence(inputs, torch.tensor(lengths), True, enforce_sorted=False)
        fused, state = self.mix(packed, state)
        return pad_packed_sequence(fused, batch_first=True)[0], state

    def packed(self, inputs: Tensor, documents: PackedDocuments) -> Tensor:
        """Fuse packed documents, on a CPU in streams of documents laid end to end."""
        if self.kind != "lstm":
            return super().packed(inputs, documents)
        if inputs.device.type != "cpu":
            # cuDNN wants its weights in one piece, and its sequences side by side cost little.
            return documents.pack(self(documents.unpack(inputs))[0])
        streams = Streams.of(documents)
        return streams.gather(self.in_streams(*streams.spread(inputs)))

    def packed_with_states(
        self, inputs: Tensor, documents: PackedDocuments
    ) -> tuple[Tensor, State | None]:
        """Fuse packed documents, and return the state after every token, ``[M, B, T, H]`` each."""
        if self.kind != "lstm":
            return super().packed_with_states(inputs, documents)
        streams = Streams.of(documents)
        hiddens, cells = [], []
        for fused, cells_of in self._layers(*streams.spread(inputs)):
            hiddens.append(streams.gather(fused))
            cells.append(streams.gather(cells_of()))
        return hiddens[-1], (torch.stack(hiddens), torch.stack(cells))

    def in_streams(self, inputs: Tensor, gaps: Tensor) -> Tensor:
        """Fuse streams in which documents follow each other, with a fresh state for each.

        A gap closes the input and the forget gate, which leaves a state of exactly zero behind it,
        and no gradient.

        Args:
            inputs: ``[N, L, 2H]`` of kind ``lstm``, zero in the gaps.
            gaps: ``[N, L]`` bool; one at least between two documents.
        """
        for fused, _ in self._layers(inputs, gaps):
            inputs = fused
        return inputs

    def _layers(
        self, inputs: Tensor, gaps: Tensor
    ) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Yield each layer's outputs and what returns its cells, ``[N, L, H]`` each."""
        lstm: Any = self.mix
        inputs = inputs.to(lstm.weight_ih_l0.dtype)
        for layer in range(lstm.num_layers):
            if layer:
                inputs = functional.dropout(inputs, lstm.dropout, self.training)
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            into, onto, *biases = (getattr(lstm, f"{name}_l{layer}") for name in names)
            if pays(onto):
                inputs, cells = recur(inputs, gaps, (into, onto, biases[0] + biases[1]))
                yield inputs, partial(_itself, cells)
            else:
                given, weights = _with_gate(inputs, gaps, [into, onto, *biases])
                start = [inputs.new_zeros(1, inputs.shape[0], lstm.hidden_size)] * 2
                settings = (True, 1, 0.0, self.training, False, True)
                inputs = torch.lstm(given, start, weights, *settings)[0]
                yield inputs, partial(_cells, given, inputs, weights)


def _itself(cells: Tensor) -> Tensor:
    return cells


def _with_gate(inputs: Tensor, gaps: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return inputs and weights with one more channel, which closes the gates in a gap.

    So the kernels are the usual ones.
    """
    into, onto, *biases = weights
    gates = into.new_zeros(4, onto.shape[1])  # input, forget, cell, output
    gates[:2] = CLOSED
    given = torch.cat([inputs, gaps.unsqueeze(-1).to(inputs)], dim=-1)
    return given, [torch.cat([into, gates.view(-1, 1)], dim=1), onto, *biases]


def _cells(given: Tensor, outputs: Tensor, weights: list[Tensor]) -> Tensor:
    """Compute a layer's cells, which the kernels do not return, from its gates by a scan."""
    into, onto, *biases = weights
    before = functional.pad(outputs, (0, 0, 1, -1))
    gates = functional.linear(given, into, biases[0] + biases[1])
    opened, kept, new, _ = (gates + functional.linear(before, onto)).chunk(4, dim=-1)
    return scan(kept.sigmoid(), opened.sigmoid() * new.tanh())


def scan(kept: Tensor, new: Tensor) -> Tensor:
    """Compute the cells ``c_t = kept_t · c_{t-1} + new_t`` of all steps ``[N, L, H]``, from zero.

    In log L rounds over all steps (Hillis and Steele's scan), each of products of numbers below 1.
    """
    step = 1
    while step < kept.shape[1]:
        new = new + kept * functional.pad(new, (0, 0, step, -step))
        kept = kept * functional.pad(kept, (0, 0, step, -step))
        step *= 2
    return new


def _is_short(inputs: Tensor) -> bool:
    """Return whether these are the few tokens of a drafting pass on a CPU."""
    few = inputs.shape[0] * inputs.shape[1] <= FEW
    return few and inputs.device.type == "cpu" and not torch.is_grad_enabled()


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Turn oneDNN off, whose LSTM lays its weights out anew in every call."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
