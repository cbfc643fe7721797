from __future__ import annotations

from typing import Any

import pytest

from falcon_lab.measure.records import Answer, Record, RoundColumns, Times
from falcon_lab.studies.bench.machine import Machine, PassCost, floor_of
from tiny_models import WINDOW, tiny_target

MACHINE = Machine(
    bytes_per_second=1e6,
    copied_bytes=1,
    operations_per_second=1e9,
    matrix_side=1,
    dtype="torch.float32",
)

# The tiny Llama: hidden 32, intermediate 64, 4 heads of 8 over 2 groups, 2 layers, vocabulary 64.
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
MATRICES = 2 * LAYER + 64 * 32
NORMS = 5 * 32


def row(prompt_tokens: int, nodes: list[int], accepted: list[int], verify: float) -> Record:
    rounds = RoundColumns(nodes=nodes, accepted=accepted)
    times = Times(1.0, 0.0, 1.0, 0.0, verify, 0.0, 0.0, 0.0)
    turn = Answer(prompt_tokens, [1], "", "length", times, rounds)
    return Record("m", "p", "", [turn], [1.0])


def test_a_llama_pass_reads_its_matrices_norms_and_cache_once() -> None:
    cost = PassCost.of(tiny_target("llama"))
    assert cost is not None
    assert cost.weights == MATRICES
    assert cost.weight_bytes == 4 * (MATRICES + NORMS)
    cached = 2 * 2 * 8 * 4  # keys and values of two heads of eight float32
    assert cost.cache_bytes == cached
    assert cost.bytes(new=3, context=10) == cost.weight_bytes + 2 * cached * 13
    assert cost.operations(new=3, context=10) == 2 * 3 * MATRICES + 4 * 3 * 32 * 2 * 13


def test_tied_weights_are_read_once_as_the_head() -> None:
    target = tiny_target("gpt2")  # its head is its embedding table
    cost = PassCost.of(target)
    assert cost is not None
    everything = sum(p.numel() for p in target.model.parameters())
    positions = target.model.transformer.wpe.weight.numel()
    assert cost.weight_bytes == 4 * (everything - positions)


def test_a_layer_with_a_window_reads_no_more_than_the_window() -> None:
    cost = PassCost.of(tiny_target("gemma3"))  # one sliding layer, one that sees all
    assert cost is not None
    assert cost.windows == (WINDOW, None)
    assert cost.bytes(1, 100) - cost.bytes(1, WINDOW) == cost.cache_bytes * (100 - WINDOW)


def test_what_a_mixture_of_experts_reads_is_not_guessed() -> None:
    target = tiny_target("llama")
    target.config.num_local_experts = 8
    assert PassCost.of(target) is None


@pytest.fixture
def cost() -> PassCost:
    return PassCost(
        weight_bytes=1000, weights=2_000_000, cache_bytes=10, attention=0, windows=(None, None)
    )


def test_the_floor_is_the_slower_of_memory_and_arithmetic_pass_by_pass(cost: PassCost) -> None:
    # The first pass reads 1 token after 100, the second 4 after 101.
    found = floor_of([row(100, [0, 3], [0, 2], verify=0.05)], cost, MACHINE)
    assert found is not None
    moved = [1000 + 10 * (2 * 100 + 2), 1000 + 10 * (2 * 101 + 8)]
    done = [2 * 2e6, 4 * 2 * 2e6]
    assert (found.passes, found.rows, found.context) == (2, 2.5, 100.5)
    assert found.bytes == sum(moved) / 2
    assert found.operations == sum(done) / 2
    assert found.milliseconds == pytest.approx(25)
    assert found.memory_milliseconds == pytest.approx(1000 * sum(moved) / 2 / 1e6)
    assert found.compute_milliseconds == pytest.approx(1000 * sum(done) / 2 / 1e9)
    slowest = max(moved[0] / 1e6, done[0] / 1e9) + max(moved[1] / 1e6, done[1] / 1e9)
    assert found.reached == pytest.approx(slowest / 0.05)


def test_accepted_tokens_lengthen_the_context_of_the_next_pass(cost: PassCost) -> None:
    found = floor_of([row(10, [4, 4], [3, 0], verify=1.0)], cost, MACHINE)
    assert found is not None
    assert found.context == (10 + 14) / 2


@pytest.mark.parametrize("made", [row(5, [], [], 0.0), row(5, [], [], 1.0)])
def test_what_cannot_be_looked_into_has_no_floor(cost: PassCost, made: Any) -> None:
    assert floor_of([made], cost, MACHINE) is None
