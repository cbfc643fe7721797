from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.trees import prefix_closed
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import Register
from falcon_lab.plugins.registry import Components
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import checked
from falcon_lab.trees.templates import (
    cut,
    default_depth,
    expected_tree,
    named,
    path_probability,
    resolve,
)


def per_depth(name: str, block: int = 2) -> list[int]:
    return [count for _, count in sorted(Counter(map(len, named(name, block))).items())]


def test_the_papers_trees_have_the_published_node_counts() -> None:
    assert len(named("vicuna", 2)) == 156
    assert per_depth("vicuna") == [19, 15, 18, 22, 20, 22, 18, 22]
    assert len(named("llama", 2)) == 118
    assert per_depth("llama") == [20, 19, 21, 15, 14, 10, 10, 9]


def test_the_papers_trees_expand_the_published_blocks() -> None:
    blocks = {
        name: [len(plan.stands) for plan in build_layout(named(name, 2), 2).passes]
        for name in ("vicuna", "llama")
    }
    assert blocks == {"vicuna": [1, 6, 10, 11], "llama": [1, 6, 7, 7]}


@pytest.mark.parametrize(("name", "block", "height"), [("k3", 3, 6), ("k4", 4, 8)])
def test_the_trees_of_larger_blocks_have_the_papers_heights(
    name: str, block: int, height: int
) -> None:
    assert len(per_depth(name)) == height
    assert len(build_layout(named(name, block), block).passes) == 2


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5])
def test_auto_is_a_tree_of_16_nodes_within_two_to_four_passes(block: int) -> None:
    tree = named("auto", block)
    assert tree == named(f"k{block}-16", 1)
    assert len(tree) == 16
    assert 2 * block <= default_depth(block) <= 4 * block


@pytest.mark.parametrize("block", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", [8, 16, 24])
def test_a_small_trees_name_says_its_size_and_may_say_its_depth(block: int, nodes: int) -> None:
    assert len(named(f"k{block}-{nodes}", block)) == nodes
    shallow = named(f"k{block}-{nodes}-d2", block)
    assert len(shallow) == nodes
    assert max(map(len, shallow)) == 2


@pytest.mark.parametrize("name", ["", "vicunas", "k2", "k0-8", "k2-0", "k2-8-d0", "k2-16 "])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(FalconLabError, match="vicuna, llama"):
        named(name, 2)


def trees_of(nodes: int, deep: int) -> Any:
    """All prefix-closed trees of so many nodes and at most that depth."""
    ranks = range(nodes)
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        if len(path) < deep:
            paths += [(*path, rank) for rank in ranks]
    for chosen in combinations(paths[1:], nodes):
        try:
            yield checked(chosen)
        except FalconLabError:
            continue


@pytest.mark.parametrize(("block", "decay"), [(1, 1.0), (2, 0.6)])
@pytest.mark.parametrize("ranks", [(0.8, 0.1), (0.4, 0.3, 0.2), (0.5, 0.5)])
def test_no_tree_of_the_same_size_expects_more_accepted_tokens(
    block: int, decay: float, ranks: tuple[float, ...]
) -> None:
    def expected(tree: Any) -> float:
        return sum(path_probability(path, block, ranks, decay) for path in tree)

    ours = expected(expected_tree(block, 2, 4, ranks, decay))
    assert ours == pytest.approx(max(expected(tree) for tree in trees_of(4, 2)))


def test_a_model_in_which_worse_candidates_are_likelier_is_refused() -> None:
    with pytest.raises(ValueError, match="must not rise"):
        expected_tree(1, 3, 5, (0.1, 0.2))
    with pytest.raises(ValueError, match="slot_decay"):
        expected_tree(1, 3, 5, slot_decay=1.1)


@given(
    prefix_closed(),
    st.integers(1, 4),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 12),
)
def test_a_cut_tree_is_a_tree_within_the_budget(
    paths: list[Any], block: int, depth: int | None, nodes: int | None
) -> None:
    part = cut(paths, block, depth, nodes)
    assert set(part) <= set(paths)
    assert checked(part) == part
    shallow = [path for path in paths if depth is None or len(path) <= depth]
    assert len(part) == min(len(shallow), len(shallow) if nodes is None else nodes)


def test_resolve_takes_a_name_a_mapping_or_a_list() -> None:
    expected = ((0,), (1,), (0, 0))
    assert resolve({"": 2, "0": 1}, context(2)) == expected
    assert resolve([[0, 0], [0], [1]], context(2)) == expected
    assert resolve(["1", "0", "00"], context(2)) == expected
    assert resolve("auto", context(3)) == named("k3-16", 3)
    with pytest.raises(FalconLabError, match="7 is not understood"):
        resolve(7, context(2))


def context(block: int, **options: Any) -> BuildContext:
    host: Any = None
    return BuildContext(host, block, **options)


def test_a_registered_template_is_called_by_its_name() -> None:
    def build(config: None, context: BuildContext) -> list[str]:
        return ["1", "0", *(["00"] if context.block == 2 else [])]

    registrar = Register("mine", "1")
    registrar.template("fork", build)
    components = Components(registrar.components)
    assert resolve("fork", context(2, components=components)) == ((0,), (1,), (0, 0))
    assert resolve("mine/fork", context(1, components=components)) == ((0,), (1,))
    with pytest.raises(FalconLabError, match="'fork' does not exist"):
        resolve("fork", context(2))


def test_the_registry_hands_itself_to_the_builder_static() -> None:
    components = load_components()
    node = {"name": "static", "template": "falcon-lab/vicuna"}
    built = components.build("tree_builder", node, context(2))
    assert built.paths == named("vicuna", 2)


@pytest.mark.parametrize(
    "node",
    [
        *({"name": "static", "template": name} for name in ("auto", "k3-40", "k3", "vicuna")),
        {"name": "chain", "depth": 9},
        {"name": "dynamic", "nodes": 40},
        {"name": "optimal", "nodes": 40},
    ],
    ids=lambda node: node.get("template", node["name"]),
)
def test_no_tree_is_deeper_than_what_the_drafter_reaches(node: dict[str, Any]) -> None:
    build = load_components().build
    assert build("tree_builder", node, context(3)).max_depth > 3
    one_pass = build("tree_builder", node, context(3, max_passes=1))
    assert one_pass.max_depth == 3
    if node.get("template") == "k3-40":
        assert one_pass.max_nodes == 41  # drawn for that depth, not cut down to it
