from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fakes.recording import Refusing, Repeating
from falcon_lab.model.fixed import FixedPass
from falcon_lab.testing.compiling import Pretend, traced


class Two(nn.Module):
    """A sum and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(one) + other, one * other


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, generator=generator), torch.randn(3, generator=generator)


def same(made: FixedPass, module: nn.Module) -> None:
    found = [made(*drawn(seed)) for seed in range(3)]  # none is overwritten by a later one
    for seed, ours in enumerate(found):
        for one, other in zip(ours, module(*drawn(seed)), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@torch.no_grad()
def test_a_compiled_pass_is_the_module() -> None:
    module, compiler = Two(), Pretend()
    made = FixedPass(module, drawn(9), "two", lambda line: None, compiler)
    made.prepare()
    same(made, module)
    same(copy.deepcopy(made), module)
    assert (compiler.names, compiler.calls) == (["two"], 6)
    same(FixedPass(module, drawn(9), "two", lambda line: None, traced), module)


@torch.no_grad()
def test_a_replayed_pass_is_the_module() -> None:
    module, recorder = Two(), Repeating()
    made = FixedPass(module, drawn(9), "two", lambda line: None, recorder=recorder)
    made.prepare()
    same(made, module)
    same(copy.deepcopy(made), module)
    assert (recorder.captures, recorder.replays) == (1, 6)


@torch.no_grad()
def test_without_a_graph_the_module_goes_on_and_that_is_said_once() -> None:
    module, recorder, said = Two(), Refusing(), list[str]()
    same(FixedPass(module, drawn(9), "two", said.append, recorder=recorder), module)
    assert recorder.tried == len(said) == 1
    assert said[0].startswith("two: no CUDA graphs")


@torch.no_grad()
def test_inputs_of_other_shapes_are_refused() -> None:
    made = FixedPass(Two(), drawn(9), "two", lambda line: None, Pretend())
    with pytest.raises(AssertionError):
        made(torch.zeros(4, 3), torch.zeros(3))
