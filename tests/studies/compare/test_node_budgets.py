"""What the words of ``budgets`` stand for."""

from __future__ import annotations

import pytest

from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.studies.compare.plan import parse_budget
from tiny_models import tiny_target

OWN = {"name": "static", "template": "auto"}


@pytest.fixture(scope="module")
def components() -> Components:
    return load_components()


@pytest.mark.parametrize("nodes", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_tree_of_n_verifies_n_nodes_at_most_and_reaches_the_same_depth_for_every_k(
    nodes: int, block: int, components: Components
) -> None:
    node = parse_budget(f"tree-{nodes}", "budgets[0]").tree(OWN)
    tree = components.build("tree_builder", node, BuildContext(tiny_target(), block))
    assert tree.max_nodes == nodes + 1  # the root is counted there
    assert tree.max_depth == min(8, nodes)


def test_a_chain_of_d_is_one_path(components: Components) -> None:
    node = parse_budget("chain-5", "budgets[0]").tree(OWN)
    tree = components.build("tree_builder", node, BuildContext(tiny_target(), 2))
    assert (tree.max_depth, tree.max_nodes, tree.proposal) == (5, 6, "sampled")


def test_own_is_the_heads_tree() -> None:
    assert parse_budget("own", "budgets[0]").tree(OWN) is OWN


@pytest.mark.parametrize("word", ["tree", "tree-0", "chain-x", "trees-16", "16", "Best"])
def test_any_other_word_is_refused_at_its_key(word: str) -> None:
    with pytest.raises(ConfigError, match=r"budgets\[3\]: no budget") as caught:
        parse_budget(word, "budgets[3]")
    assert caught.value.key == "budgets[3]"
