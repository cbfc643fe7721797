"""Compute an LSTM layer over whole streams on a CPU, where its weights are large.

The kernels of oneDNN multiply inputs and states step by step. Here all inputs are multiplied at
once before, and all gradients of weights at once behind, so that a step has one product with the
recurrent weights; and the cells come out too. For a layer of width 576 and 16 streams that takes
0.85 of the kernels' time forward and backward, without gradients half of it; of width 2048, 0.45
and half. A narrow layer is bound by the calls of its steps, and the kernels' again.

A step of few streams mostly reads its weights: with autocast's products in bfloat16, a layer of
width 576 and 5 streams takes half the time.

Shapes: N streams, L steps, H hidden, C channels of an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

LARGE = 2**21
"""Bytes of recurrent weights from which on ``recur`` is faster: more than a core's own cache."""


def pays(onto: Tensor) -> bool:
    """Return whether ``recur`` is faster than the kernels, for weights ``[4·H, H]``."""
    return onto.device.type == "cpu" and onto.numel() * onto.element_size() >= LARGE


def recur(
    inputs: Tensor, gaps: Tensor, weights: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Run a layer over streams, each from a state of zeros, which a gap brings back.

    Under autocast products are in its precision, and gates, states and cells in the weights'.

    Args:
        inputs: ``[N, L, C]``.
        gaps: ``[N, L]`` bool.
        weights: of the inputs ``[4·H, C]``, of the state ``[4·H, H]``, and both biases' sum
            ``[4·H]``; in the order input, forget, cell, output.

    Returns:
        The states and the cells of all steps, ``[N, L, H]`` each.
    """
    into, onto, bias = weights
    given = functional.linear(inputs.transpose(0, 1), into, bias)
    device = inputs.device.type
    half = torch.is_autocast_enabled(device)
    product = torch.get_autocast_dtype(device) if half else onto.dtype
    with torch.autocast(device, enabled=False):
        closed = gaps.t().unsqueeze(-1)
        hidden, cells = _Recurrence.apply(given.to(onto.dtype), onto, closed, product)
    return hidden.transpose(0, 1), cells.transpose(0, 1)


class _Recurrence(torch.autograd.Function):
    """From ``[L, N, 4·H]``, what the inputs give the gates, to states and cells ``[L, N, H]``.

    ``gaps`` are ``[L, N, 1]`` bool; their gates are closed. Products are computed in ``product``.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, onto: Tensor, gaps: Tensor, product: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        onto = onto.to(product)
        (streams, width), upon = (given.shape[1], onto.shape[1]), onto.t().contiguous()
        gates = given.masked_fill(gaps, -torch.inf)
        cells = given.new_empty(*given.shape[:2], width)
        states = torch.empty_like(cells)
        hidden = cell = given.new_zeros(streams, width)
        for gate, new_cell, new_hidden in zip(gates, cells, states, strict=True):
            gate.add_(hidden.to(product) @ upon)
            opened, kept, new, shown = gate.split(width, dim=1)
            gate[:, : 2 * width].sigmoid_()
            new.tanh_()
            shown.sigmoid_()
            torch.mul(kept, cell, out=new_cell).addcmul_(opened, new)
            torch.tanh(new_cell, out=new_hidden).mul_(shown)
            hidden, cell = new_hidden, new_cell
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(gates, cells, states, onto)
        return states, cells

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_states: Tensor, of_cells: Tensor) -> tuple[Tensor | None, ...]:
        gates, cells, states, onto = ctx.saved_tensors
        kept = gates.chunk(4, dim=-1)[1]
        slopes, of_cell_by_state = _slopes(gates, cells)
        hidden, cell = torch.zeros_like(of_states[0]), torch.zeros_like(of_cells[0])
        for step in reversed(range(len(gates))):
            hidden = hidden + of_states[step]
            cell = (cell + of_cells[step]).addcmul_(hidden, of_cell_by_state[step])
            gate = slopes[step].unflatten(-1, (4, -1))
            gate[:, :3].mul_(cell.unsqueeze(1))
            gate[:, 3].mul_(hidden)
            cell = cell * kept[step]
            hidden = (slopes[step].to(onto.dtype) @ onto).to(hidden.dtype)
        later, before = (part.flatten(0, 1).to(onto.dtype) for part in (slopes[1:], states[:-1]))
        return slopes, (later.t() @ before).to(slopes.dtype), None, None


def _slopes(gates: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return how a step's cell (its state, for the last gate) changes with what enters its gates.

    Args:
        gates: ``[L, N, 4·H]``, behind their sigmoid or tanh.
        cells: ``[L, N, H]``.

    Returns:
        ``[L, N, 4·H]``; and ``[L, N, H]``, how a state changes with its cell.
    """
    opened, kept, new, shown = gates.chunk(4, dim=-1)
    slopes, seen = torch.empty_like(gates), cells.tanh()
    by_opened, by_kept, by_new, by_shown = slopes.chunk(4, dim=-1)
    torch.mul(new, opened - opened.square(), out=by_opened)
    by_kept[0] = 0
    torch.mul(cells[:-1], (kept - kept.square())[1:], out=by_kept[1:])
    torch.mul(opened, 1 - new.square(), out=by_new)
    torch.mul(seen, shown - shown.square(), out=by_shown)
    return slopes, shown * (1 - seen.square())
