from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from fakes.trees import prefix_closed
from falcon_lab.errors import FalconLabError
from falcon_lab.trees.paths import checked, from_child_counts, parse_node, path_name


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ()),
        ("0", (0,)),
        ("02", (0, 2)),
        ("/12", (12,)),
        ("0/12/1", (0, 12, 1)),
        ([0, 3], (0, 3)),
    ],
)
def test_a_node_is_rank_digits_or_ranks_between_slashes(text: Any, path: Any) -> None:
    assert parse_node(text) == path


@given(prefix_closed())
def test_the_name_of_a_node_reads_back(paths: list[Any]) -> None:
    assert [parse_node(path_name(path)) for path in [*paths, (12,), (1, 12)]] == [
        *paths,
        (12,),
        (1, 12),
    ]


@pytest.mark.parametrize("node", [0, 12, "0a", "0,1", [0, -1], [True], 1.5, None])
def test_what_is_no_node_is_refused_by_its_own_text(node: Any) -> None:
    with pytest.raises(FalconLabError) as error:
        parse_node(node)
    assert repr(node) in str(error.value)
    assert ("quote it" in str(error.value)) == isinstance(node, int)


@given(prefix_closed())
def test_nodes_come_out_by_depth_and_then_by_path(paths: list[Any]) -> None:
    ordered = checked(reversed(paths))
    assert set(ordered) == set(paths)
    assert list(ordered) == sorted(paths, key=lambda path: (len(path), path))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (["0", "1", "00", "1"], "node 1 is listed twice"),
        ([(0,), (0, 0), (1, 0)], "node 10 is an orphan: 1 is not in the tree"),
        ([(1,)], "node 1 follows a gap: the root has no child of rank 0"),
        (["0", "00", "02"], "node 02 follows a gap: 0 has no child of rank 1"),
        ([(0,), ()], "the root is in every tree"),
    ],
)
def test_duplicates_orphans_and_gaps_are_refused_by_name(nodes: Any, message: str) -> None:
    with pytest.raises(FalconLabError, match=message):
        checked(nodes)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"": 1, "1": 2}, "node 1 is an orphan: the root is not in the tree or has too few"),
        ({"": 1, "00": 2}, "node 00 is an orphan"),
        ({"0": 2}, "node 0 is an orphan"),
        ({"": 2, "00": 1, "0/0": 2}, "node 00 has two child counts"),
        ({"": "3"}, "the root has '3' children"),
        ({"": 2, 0: 1}, "quote it"),
    ],
)
def test_child_counts_are_refused_where_they_make_no_tree(counts: Any, message: str) -> None:
    with pytest.raises(FalconLabError, match=message):
        from_child_counts(counts)


def test_child_counts_spell_out_a_tree_in_any_order() -> None:
    assert from_child_counts({"0": 2, "": 3, "01": 1, "2": 0}) == (
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
        (0, 1, 0),
    )


def test_ranks_of_ten_and_more_have_children_too() -> None:
    paths = from_child_counts({"": 13, "/12": 11, "12/10": 1})
    assert len(paths) == 13 + 11 + 1
    assert paths[-1] == (12, 10, 0)
