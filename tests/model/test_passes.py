from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fakes.recording import Refusing, Repeating
from falcon_lab.interfaces import Outputs
from falcon_lab.model.compiled import CompiledPass
from falcon_lab.model.graphs import GraphPass
from falcon_lab.model.passes import EagerPass, Forward, ForwardPass, NewPositions
from falcon_lab.testing.compiling import Pretend, traced


class Two(Forward):
    """A sum and a product; nothing is kept of earlier positions."""

    def __init__(self) -> None:
        super().__init__("two")
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: list[Tensor], new: NewPositions | None = None) -> Outputs:
        one, other = inputs
        return self.linear(one) + other, one * other

    def examples(self, most: int) -> Iterator[list[Tensor]]:
        yield drawn(9)


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator), torch.randn(3, generator=generator)]


def same(made: ForwardPass, module: Two) -> None:
    found = [made(drawn(seed)) for seed in range(3)]  # none is overwritten by a later one
    for seed, ours in enumerate(found):
        for one, other in zip(ours, module(drawn(seed)), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@torch.no_grad()
def test_a_compiled_pass_is_the_module() -> None:
    module, compiler = Two(), Pretend()
    made = CompiledPass(module, lambda line: None, compiler)
    made.prepare(1)
    same(made, module)
    same(copy.deepcopy(made), module)
    assert (compiler.names, compiler.calls) == (["two"], 6)
    same(CompiledPass(module, lambda line: None, traced), module)


@torch.no_grad()
def test_a_replayed_pass_is_the_module() -> None:
    module, recorder = Two(), Repeating()
    made = GraphPass(module, lambda line: None, recorder)
    made.prepare(1)
    same(made, module)
    same(copy.deepcopy(made), module)
    assert (recorder.captures, recorder.replays) == (1, 6)


@torch.no_grad()
def test_without_a_graph_the_module_goes_on_and_that_is_said_once() -> None:
    module, recorder, said = Two(), Refusing(), list[str]()
    same(GraphPass(module, said.append, recorder), module)
    assert recorder.tried == len(said) == 1
    assert said[0].startswith("two: no CUDA graphs")


@torch.no_grad()
def test_inputs_of_other_shapes_get_a_pass_of_their_own() -> None:
    module, compiler = Two(), Pretend()
    made = CompiledPass(module, lambda line: None, compiler)
    same(made, module)
    other = [torch.ones(4, 3), torch.ones(3)]
    for ours, theirs in zip(made(other), module(other), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert len(compiler.names) == 2


@torch.no_grad()
def test_an_eager_pass_is_the_module_and_so_is_its_copy() -> None:
    module = Two()
    made = EagerPass(module)
    made.prepare(1)
    same(made, module)
    same(copy.deepcopy(made), module)
    assert made.is_eager
