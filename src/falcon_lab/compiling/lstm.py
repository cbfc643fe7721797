"""An LSTM written out row after row, as a compiler or a graph can take it in.

Shapes: D sequences, L rows of a sequence, I input, H hidden, M layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


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
