from __future__ import annotations

from typing import Any

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, TreeBuilder
from falcon_lab.plugins.builtins import StaticConfig
from falcon_lab.trees.template_tree import StaticTree
from falcon_lab.trees.templates import named

HOST: Any = None


def built(block: int = 2, **options: Any) -> StaticTree:
    return StaticTree(StaticConfig(**options), BuildContext(HOST, block))


def test_auto_follows_the_drafters_block() -> None:
    tree: TreeBuilder = built(block=3)
    assert (tree.max_nodes, tree.max_depth) == (17, 6)
    assert built(block=3).paths == named("k3-16", 3)


def test_a_template_is_cut_at_max_depth() -> None:
    tree = built(template="vicuna", max_depth=4)
    assert (tree.max_nodes, tree.max_depth) == (19 + 15 + 18 + 22 + 1, 4)


def test_a_template_written_out_is_taken_as_it_is() -> None:
    assert built(template={"": 2, "1": 1}).paths == ((0,), (1,), (1, 0))


def test_a_broken_template_is_refused_when_it_is_built() -> None:
    with pytest.raises(FalconLabError, match="node 01 follows a gap"):
        built(template=["0", "01"])


def test_the_proposal_is_the_configured_one() -> None:
    assert built(proposal="sampled").proposal == "sampled"
