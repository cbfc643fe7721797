"""The search against every tree there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falcon_lab.studies.tune.choosing import search
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.replay import Odds, TracedRound, odds, table
from falcon_lab.studies.tune.search import Forest, best_tree, expected
from falcon_lab.studies.tune.texts import ReplayedRound
from falcon_lab.trees.paths import Path, checked

DEPTH = 4

looks_lists = st.lists(
    st.builds(
        lambda ranks, more, sure, limit: TracedRound(
            tuple(ranks), len(ranks) + more, _falling(sure), limit
        ),
        st.lists(st.sampled_from([0, 0, 0, 0, 1, 1, 2]), max_size=DEPTH),
        st.integers(0, 1),
        st.lists(st.floats(0, 1), min_size=DEPTH, max_size=DEPTH),
        st.sampled_from([DEPTH, 9, 2]),
    ),
    min_size=3,
    max_size=12,
)


def _falling(steps: list[float]) -> tuple[float, ...]:
    return tuple(-sum(steps[: at + 1]) for at in range(len(steps)))


def curve(nodes: int, rises: list[float]) -> list[tuple[float, float]]:
    return [(n, 1.0 + sum(rises[:n])) for n in range(nodes + 1)]


def straight(nodes: int, slope: float) -> list[tuple[float, float]]:
    return [(n, 1.0 + slope * n) for n in range(nodes + 1)]


def costs(verify: list[tuple[float, float]], later: float = 0.1, block: float = 0.05) -> Costs:
    return Costs(verify, first=0.1, later=later, block=block, asking=0.02, fixed=0.1, step=1.0)


def all_trees(nodes: int, depth: int, width: int = 3) -> Iterator[list[Path]]:
    """Every prefix-closed tree without gaps."""

    def below(path: Path, left: int) -> Iterator[list[Path]]:
        """What can hang below a node that is there."""
        if len(path) == depth:
            yield []
            return
        for count in range(min(width, left) + 1):
            children = [(*path, rank) for rank in range(count)]
            rest = left - count
            options = [list(below(child, rest)) for child in children]
            for parts in product(*options):
                if sum(map(len, parts)) <= rest:
                    yield [*children, *(node for part in parts for node in part)]

    yield from below((), nodes)


def test_all_trees_are_counted_once() -> None:
    trees = [checked(tree) for tree in all_trees(4, 4, width=4)]
    assert len(trees) == len(set(trees)) == 1 + 1 + 2 + 5 + 14  # Catalan numbers


def exhaustive(chances: Odds, price: Costs, block: int, nodes: int, asking: bool) -> float:
    depth = len(chances.reach) - 1
    return max(
        expected(tree, chances, price, block, asking=asking).rate
        for tree in all_trees(nodes, depth)
    )


@settings(max_examples=40)
@given(
    looks_lists,
    st.sampled_from([(1, 2), (1, 4), (2, 2)]),
    st.lists(st.sampled_from([0.0, 0.0, 0.02, 0.2]), min_size=5, max_size=5),
    st.sampled_from([0.0, 0.3, 0.9]),
)
def test_without_a_controller_the_tree_is_the_best_of_all_for_any_cost_of_nodes(
    traces: list[TracedRound], shape: tuple[int, int], rises: list[float], block_price: float
) -> None:
    block, most = shape
    traces = [TracedRound(found.ranks, found.known, found.confidence, 9) for found in traces]
    price = costs(curve(5, rises), later=max(0.1, block_price), block=block_price)
    top, brute = 0.0, 0.0
    for passes in range(1, most + 1):
        chances = odds(traces, block, passes, -math.inf)
        best = best_tree(chances, price, block, 5)
        checked(best.paths)
        assert len(best.paths) <= 5
        top = max(top, best.rate)
        brute = max(brute, exhaustive(chances, price, block, 5, asking=False))
    assert top == pytest.approx(brute, rel=1e-9)


@settings(max_examples=40)
@given(
    looks_lists,
    st.sampled_from([(1, 2), (1, 3), (2, 2)]),
    st.sampled_from([0.0, 0.03, 0.1]),
    st.sampled_from([0.4, 0.8]),
)
def test_with_a_controller_it_is_for_costs_that_are_a_straight_line(
    traces: list[TracedRound], shape: tuple[int, int], slope: float, threshold: float
) -> None:
    block, most = shape
    price = costs(straight(5, slope))
    top, brute = 0.0, 0.0
    for passes in range(1, most + 1):
        chances = odds(traces, block, passes, math.log(threshold))
        top = max(top, best_tree(chances, price, block, 5, asking=True).rate)
        brute = max(brute, exhaustive(chances, price, block, 5, asking=True))
    assert top == pytest.approx(brute, rel=1e-9)


@settings(max_examples=20)
@given(looks_lists, st.sampled_from([1, 2]))
def test_the_best_over_all_thresholds_is_no_worse_than_any(
    traces: list[TracedRound], block: int
) -> None:
    price = costs(straight(6, 0.05))
    best, found = search(traces, price, block, nodes=6, depth=DEPTH)
    assert best.candidate.rate == max(choice.candidate.rate for choice in found)
    assert found[0].threshold is None
    plain = expected((), odds(traces, block, 1, -math.inf), price, block)
    assert best.candidate.rate >= plain.rate


def test_free_nodes_are_all_taken_and_dear_ones_are_not() -> None:
    traces = [TracedRound((0, 0), 4, (-0.1,) * 4, 9), TracedRound((1,), 4, (-0.1,) * 4, 9)]
    chances = odds(traces, 1, 2, -math.inf)
    free = best_tree(chances, costs(straight(8, 0.0), later=0.0, block=0.0), 1, 8)
    assert set(free.paths) >= {(0,), (1,), (0, 0)}
    assert free.tokens == 2.5
    assert best_tree(chances, costs(straight(8, 9.0)), 1, 8).paths == ()


def test_a_floor_that_is_out_of_reach_is_not_searched_for() -> None:
    traces = [TracedRound((0,), 1, (-0.1,), 9)]
    chances = odds(traces, 1, 1, -math.inf)
    found = best_tree(chances, costs(straight(2, 0.1)), 1, 2, floor=1e6)
    assert found.rate < 1e6


def test_only_the_likeliest_nodes_are_candidates_with_all_that_comes_before_them() -> None:
    gain = {(0,): 0.1, (1,): 0.3, (1, 0): 0.05, (1, 0, 2): 0.04, (2,): 0.01}
    chances = Odds(gain, [1.0] * 4, [1.0] * 4, [1.0] * 4)
    assert Forest(chances, 1, candidates=4).paths == [
        (0,),
        (1,),
        (1, 0),
        (1, 0, 0),
        (1, 0, 1),
        (1, 0, 2),
    ]
    assert Forest(Odds({}, [1.0], [1.0], [1.0]), 1).trees(3, 0.0, 0.0) == []


@given(looks_lists, st.sampled_from([1, 2]), st.sampled_from([-math.inf, math.log(0.5)]))
def test_expected_tokens_are_the_mean_over_the_rounds(
    traces: list[TracedRound], block: int, threshold: float
) -> None:
    tree = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    most = -(-3 // block)
    tokens = 0
    for found in traces:
        made = found.passes(block, most, threshold)
        deepest = min(found.limit, made * block, len(found.ranks))
        tokens += 1 + max(n for n in range(deepest + 1) if n == 0 or found.ranks[:n] in tree)
    chances = odds(traces, block, most, threshold)
    found_tokens = expected(tree, chances, costs(straight(6, 0.1)), block).tokens
    assert found_tokens == pytest.approx(tokens / len(traces))


@given(looks_lists, st.sampled_from([1, 2]), st.sampled_from([-math.inf, math.log(0.5)]))
def test_expected_seconds_are_the_mean_over_the_rounds(
    traces: list[TracedRound], block: int, threshold: float
) -> None:
    """Round by round, as a replay would be priced."""
    traces = [TracedRound(found.ranks, found.known, found.confidence, 9) for found in traces]
    tree = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]
    price, most = costs(straight(6, 0.1)), -(-3 // block)
    seconds = 0.0
    for found in traces:
        made = found.passes(block, most, threshold)
        kept = [path for path in tree if len(path) <= made * block]
        blocks = tuple(
            len({path[: j * block] for path in tree if len(path) > j * block}) for j in range(made)
        )
        asked = min(made, most - 1)
        one = price.round(ReplayedRound(len(kept), blocks, 1)) + asked * price.asking
        seconds += one
    chances = odds(traces, block, most, threshold)
    found_seconds = expected(tree, chances, price, block, asking=True).seconds
    assert found_seconds == pytest.approx(seconds / len(traces))


@given(looks_lists, st.booleans())
def test_an_acceptance_table_sums_to_one_at_every_depth(
    traces: list[TracedRound], first: bool
) -> None:
    rows = table(traces, 2, first=first)
    for row in rows:
        assert sum(row.ranks) + row.beyond == pytest.approx(1)
    counts = [row.rounds for row in rows]
    assert counts == sorted(counts, reverse=True)
    if rows:
        assert rows[0].rounds == sum(found.known > 0 for found in traces)


def test_an_acceptance_table_of_known_rounds() -> None:
    traces = [
        TracedRound((0, 0), 2, (), 9),
        TracedRound((1, 0), 3, (), 9),
        TracedRound((0,), 2, (), 9),
        TracedRound((), 0, (), 9),
    ]
    rows = table(traces, 2)
    assert [(row.depth, row.rounds, row.ranks, row.beyond) for row in rows] == [
        (1, 3, [2 / 3, 1 / 3], 0.0),
        (2, 3, [2 / 3, 0.0], 1 / 3),
        (3, 1, [0.0, 0.0], 1.0),
    ]
    chain = table(traces, 2, first=True)
    assert [(row.depth, row.rounds, row.ranks, row.beyond) for row in chain] == [
        (1, 3, [2 / 3, 1 / 3], 0.0),
        (2, 2, [1 / 2, 0.0], 1 / 2),
    ]


def test_the_price_of_a_block_is_that_of_the_best_rate_and_not_of_plain_decoding() -> None:
    """A second block brings 0.2 tokens for 0.1 seconds: good at 1 token a second, poor at 2.9."""
    gain = {(0,): 0.9, (1,): 0.5, (0, 0): 0.8, (0, 1): 0.29, (1, 0): 0.49}
    chances = Odds(gain, [1.0] * 3, [1.0] * 3, [1.0] * 3)
    price = Costs([(0, 1.0)], first=0.1, later=0.1, block=0.1, asking=0, fixed=0, step=1)
    best = best_tree(chances, price, 1, 4)
    assert best.paths == ((0,), (1,), (0, 0), (0, 1))
    assert best.rate == pytest.approx(3.49 / 1.2)


def test_a_node_that_is_seldom_drafted_is_seldom_verified() -> None:
    gain = {(0,): 0.9, (1,): 0.3, (0, 0): 0.29}
    chances = Odds(gain, [1.0, 1.0, 0.5], [1.0, 1.0, 0.5], [0.0, 1.0, 0.0])
    price = Costs(straight(2, 0.2), first=0.1, later=0, block=0, asking=0, fixed=0, step=1)
    best = best_tree(chances, price, 1, 2, asking=True)
    assert best.paths == ((0,), (0, 0))
    assert best.rate == pytest.approx(2.19 / (1 + 0.1 + 0.2 + 0.1))
