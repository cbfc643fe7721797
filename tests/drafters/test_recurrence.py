"""The layer that is computed step by step against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from falcon_lab.drafters.recurrence import LARGE, pays, recur

WIDTH = 4


def _weights(inputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (4 * WIDTH, inputs), (4 * WIDTH, WIDTH), (4 * WIDTH,)
    into, onto, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    return into, onto, bias


def _inputs(streams: int, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = streams, steps, 3
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(("streams", "steps"), [(1, 1), (3, 1), (1, 6), (3, 7)])
def test_states_and_gradients_are_those_of_pytorch_s_lstm(streams: int, steps: int) -> None:
    inputs, weights = _inputs(streams, steps), _weights()
    gaps = torch.zeros(streams, steps, dtype=torch.bool)
    hidden, cells = recur(inputs, gaps, weights)
    start = torch.zeros(1, streams, WIDTH, dtype=torch.float64)
    into, onto, bias = weights
    expected, _, last = torch.lstm(
        inputs, [start] * 2, [into, onto, bias, 0 * bias], True, 1, 0.0, True, False, True
    )
    assert torch.allclose(hidden, expected)
    assert torch.allclose(cells[:, -1], last[0])
    factor = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
    of = [inputs, *weights]
    ours = torch.autograd.grad((hidden * factor).sum() + cells[:, -1].sum(), of)
    theirs = torch.autograd.grad((expected * factor).sum() + last.sum(), of)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other)


def test_gradients_are_those_of_small_differences_with_gaps_too() -> None:
    gaps = torch.tensor([[False] * 5, [False, True, False, False, True]])
    weights, inputs = _weights(), _inputs(2, 5)
    assert torch.autograd.gradcheck(lambda *of: recur(of[0], gaps, of[1:]), (inputs, *weights))


def test_half_precision_is_for_products_alone() -> None:
    weights = tuple(weight.detach().float().requires_grad_() for weight in _weights())
    inputs = _inputs(2, 5).detach().float().requires_grad_()
    gaps = torch.zeros(2, 5, dtype=torch.bool)
    gaps[1, 2] = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, cells = recur(inputs, gaps, weights)  # type: ignore[arg-type]
    assert {hidden.dtype, cells.dtype} == {torch.float32}
    expected = recur(inputs, gaps, weights)[0]  # type: ignore[arg-type]
    assert torch.allclose(hidden, expected, atol=0.05)
    assert not torch.equal(hidden, expected)
    of = [inputs, *weights]
    ours, theirs = (torch.autograd.grad(part.square().sum(), of) for part in (hidden, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() < 0.03 * other.norm()
        assert not torch.equal(mine, other)


@pytest.mark.parametrize(("width", "large"), [(128, False), (576, True)])
def test_only_large_weights_go_this_way(width: int, large: bool) -> None:
    assert pays(torch.empty(4 * width, width)) is large
    assert (4 * 4 * width**2 >= LARGE) is large
