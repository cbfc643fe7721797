"""The published tree: its counts, its mask and its paths."""

from __future__ import annotations

from collections import Counter

import torch
from medusa_cases import KNOWN

from falcon_lab.interfaces import BuildContext
from falcon_lab.trees.layout import build_layout

PUBLISHED = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21
004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001
16 070
"""
"""The nodes in the order in which the official code lists them, the most useful first."""

TREE = KNOWN.build(
    "tree_builder", {"name": "static", "template": "mc_sim_7b_63"}, BuildContext(None, 4, 1)
)
LAYOUT = build_layout(TREE.paths, 4)


def test_the_nodes_are_those_that_were_published() -> None:
    assert sorted("".join(map(str, path)) for path in TREE.paths) == sorted(PUBLISHED.split())
    assert (TREE.max_nodes, TREE.max_depth) == (64, 4)
    assert Counter(LAYOUT.depth.tolist()) == {0: 1, 1: 10, 2: 28, 3: 23, 4: 2}


def test_there_are_42_paths_to_retrieve_and_each_runs_from_the_root_to_a_leaf() -> None:
    leaves = [n for n in range(64) if not (LAYOUT.parents == n).any()]
    assert len(leaves) == 42
    assert LAYOUT.routes[leaves].shape == (42, 5)
    names = ["".join(map(str, path)) for path in LAYOUT.paths]
    for leaf in leaves:
        route = dict.fromkeys(LAYOUT.routes[leaf].tolist())
        assert [names[node] for node in route] == [names[leaf][:d] for d in range(len(route))]


def test_a_node_sees_its_ancestors_and_nothing_else() -> None:
    mask = torch.zeros(64, 64, dtype=torch.bool)
    for row, path in enumerate(LAYOUT.paths):
        for column, other in enumerate(LAYOUT.paths):
            mask[row, column] = path[: len(other)] == other
    assert torch.equal(LAYOUT.ancestors, mask)
    assert int(mask.sum()) == 1 + 10 * 2 + 28 * 3 + 23 * 4 + 2 * 5


def test_all_candidates_come_from_one_pass_head_by_head() -> None:
    """A node is numbered as in the official ``tree_indices``: rank + 10·head, from 1 on."""
    (only,) = LAYOUT.passes
    expected = [path[-1] + 10 * (len(path) - 1) for path in LAYOUT.paths[1:]]
    assert only.width == 10
    assert only.slots.tolist() == expected
