"""An LSTM compiled for a fixed number of rows.

Shapes: D sequences, L rows of a sequence, I input, H hidden, M layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.compiling.ahead import Announce, Compiled, PassCompiler, compile_ahead
from falcon_lab.compiling.rows import size_for
from falcon_lab.drafters.fusing import Fuse, State

MOST = 16
"""Rows of a sequence, and sequences, up to which there is a compiled pass: its recurrence is
written out row after row."""


class CompiledLSTM:
    """The LSTM of a fuse.

    Args:
        fuse: of kind ``lstm``; its weights are copied into the compiled pass.
        announce: takes one line for the user at a time.
        compiler: makes a pass of what is traced.
    """

    def __init__(
        self, fuse: Fuse, announce: Announce, compiler: PassCompiler = compile_ahead
    ) -> None:
        self._compiler = compiler
        self._traced = Unrolled(fuse.mix)
        self._announce = announce
        self._passes: dict[tuple[int, int, int], Compiled] = {}

    def takes(self, rows: Tensor) -> bool:
        """Whether ``[D, L, I]`` rows are few enough."""
        return max(rows.shape[:2]) <= MOST

    def __call__(self, rows: Tensor, state: State) -> tuple[Tensor, State]:
        """As ``nn.LSTM`` with ``batch_first``: ``[D, L, I]``, states ``[M, D, H]``."""
        count, length = rows.shape[:2]
        wide, long = size_for(count), size_for(length)
        rows = functional.pad(rows, (0, 0, 0, long - length, 0, wide - count))
        hidden, cell = (functional.pad(part, (0, 0, 0, wide - count)) for part in state)
        last = torch.tensor([length - 1])
        inputs = [rows, hidden, cell, last]
        key = (wide, long, torch.get_num_threads())
        run = self._passes.get(key)
        if run is None:
            run = self._passes[key] = self._compile(inputs)
        fused, hidden, cell = run(inputs)
        return fused[:count, :length], (hidden[:, :count], cell[:, :count])

    def _compile(self, inputs: list[Tensor]) -> Compiled:
        count, length = inputs[0].shape[:2]
        return self._compiler(
            self._traced,
            tuple(tensor.clone() for tensor in inputs),
            ({}, {}, {}, {}),
            name=f"lstm-{count}-by-{length}-rows",
            announce=self._announce,
        )


class Unrolled(nn.Module):
    """What is traced: the recurrence, row after row, and the state after any of them."""

    def __init__(self, lstm: Any) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(
        self, rows: Tensor, hidden: Tensor, cell: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``last``: ``[1]`` long, the row after which the state is asked for."""
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
        given = functional.linear(rows, into, sum(biases))
        outputs, states = [], []
        for row in given.unbind(1):
            gates = row + functional.linear(h, onto)
            opened, kept, new, shown = gates.chunk(4, dim=-1)
            c = kept.sigmoid() * c + opened.sigmoid() * new.tanh()
            h = shown.sigmoid() * c.tanh()
            outputs.append(h)
            states.append(c)
        return torch.stack(outputs, 1), torch.stack(states, 1)
