"""How a row (token embedding, feature) becomes one vector.

Shapes: D sequences, L rows of a sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = 8
"""Rows up to which PyTorch's own LSTM is faster than oneDNN's: 0.1 ms against 0.3 ms for two
layers of width 128 and two rows; equal at 16 rows. Longer inputs and training are oneDNN's."""

CLOSED = -1e4
"""What a gate reads that is to be shut: the sigmoid of it is zero in every precision."""

State = tuple[Tensor, Tensor]
"""LSTM state (h, c), each ``[layers, D, H]``."""


class Fuse(nn.Module):
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
        self.mix: nn.Module
        if kind == "linear":
            self.mix = nn.Linear(2 * hidden, hidden)
        else:
            between = dropout if layers > 1 else 0.0
            self.mix = nn.LSTM(2 * hidden, hidden, layers, dropout=between, batch_first=True)

    def forward(self, rows: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Fuse D sequences, each going on from its ``state`` (None: from the start).

        Returns the fused rows and the state after each sequence's last row (None for the kinds
        that remember nothing).
        """
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

    def anew(self, rows: Tensor, free: Tensor) -> Tensor:
        """Fuse sequences in which documents follow each other, with a fresh state for each.

        A row of no document closes the input and the forget gate through one more input channel,
        which leaves a state of zero behind it, exactly, and no gradient: the kernels are the usual.

        Args:
            rows: ``[D, L, 2H]`` of kind ``lstm``, zero where free.
            free: ``[D, L]`` bool, rows of no document; one at least between two documents.
        """
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
        return rows


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
