from __future__ import annotations

import torch

from falcon_lab.tree import TokenTree, ancestor_matrix


def test_a_node_is_among_its_own_ancestors_and_so_are_those_of_its_parent() -> None:
    ancestors = ancestor_matrix(torch.tensor([-1, 0, 0, 2]))
    assert [row.nonzero().flatten().tolist() for row in ancestors] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 2, 3],
    ]


def test_a_tree_counts_its_nodes_with_and_without_the_root() -> None:
    parents = torch.tensor([-1, 0, 0, 2])
    depth = torch.tensor([0, 1, 1, 2])
    tokens = torch.tensor([5, 6, 7, 8])
    tree = TokenTree(
        tokens, parents, depth, ancestor_matrix(parents), "deterministic", torch.zeros(4)
    )
    assert (tree.nodes, tree.drafted, tree.max_depth) == (4, 3, 2)
