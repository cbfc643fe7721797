"""Drawn trees."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from falcon_lab.interfaces import Acceptance
from falcon_lab.report.tree_drawing import (
    TreeRecorder,
    draw_svg,
    draw_text,
    layout,
    tree_record,
    visible,
)
from falcon_lab.tree import TokenTree, ancestor_matrix
from measuring import TREE

SVG = "{http://www.w3.org/2000/svg}"


def tree(parents: list[int]) -> TokenTree:
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
    p = torch.tensor(parents)
    tokens = torch.arange(97, 97 + len(parents))
    zeros = torch.zeros(len(parents))
    return TokenTree(tokens, p, torch.tensor(depth), ancestor_matrix(p), "deterministic", zeros)


def accept(*path: int) -> Acceptance:
    return Acceptance(torch.tensor(path), torch.tensor(122))


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_a_verified_tree_becomes_plain_values() -> None:
    assert tree_record(tree([-1, 0, 0, 1]), accept(0, 1), decode) == {
        "tokens": [97, 98, 99, 100],
        "parents": [-1, 0, 0, 1],
        "accepted": [0, 1],
        "texts": ["a", "b", "c", "d"],
        "next": "z",
    }


def test_a_recorder_keeps_trees_that_draft_and_knows_the_round_and_the_best() -> None:
    recorder = TreeRecorder(decode, limit=3, prompt="p", method="tree")
    recorder([5], 0, None, None)  # the first token, and plain decoding, have no tree
    recorder([5], 0, tree([-1]), accept(0))  # a tree of the root alone drafts nothing
    recorder([5], 0, tree([-1, 0]), accept(0))
    recorder([5, 6], 1, tree([-1, 0]), accept(0, 1))
    recorder([5, 6], 1, tree([-1, 0, 0]), accept(0, 2))
    recorder([5], 0, tree([-1, 0]), accept(0))  # over the limit
    assert [t["round"] for t in recorder.trees] == [2, 3, 4]
    best = recorder.best()
    assert best is not None
    assert (best["round"], best["prompt"], best["method"]) == (3, "p", "tree")
    assert TreeRecorder(decode).best() is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a\n\tb", "·a↵⇥b"),
        ("", "∅"),
        ("\x00", "�"),
        ("a" * 20, "a" * 13 + "…"),
        ("日本", "日本"),
    ],
)
def test_white_space_can_be_seen(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_the_text_drawing_marks_the_accepted_path_and_the_next_token() -> None:
    record = tree_record(tree([-1, 0, 0, 1]), accept(0, 1), decode)
    assert draw_text(record).splitlines() == ["● a", "  ● b", "    + z", "    ○ d", "  ○ c"]


def test_the_svg_is_well_formed_and_shows_every_node_once() -> None:
    picture = ElementTree.fromstring(draw_svg(TREE))
    labels = [text.text for text in picture.iter(f"{SVG}text")]
    assert sorted(labels) == sorted([*map(visible, TREE["texts"]), "values"])
    filled = [r for r in picture.iter(f"{SVG}rect") if r.get("fill") == "#1f7a4d"]
    assert len(filled) == len(TREE["accepted"])
    thick = [p for p in picture.iter(f"{SVG}path") if p.get("stroke-width") == "2.5"]
    assert len(thick) == len(TREE["accepted"]) - 1


def test_markup_in_a_token_stays_text() -> None:
    record = dict(TREE, texts=["<script>&"] * len(TREE["texts"]))
    labels = [t.text for t in ElementTree.fromstring(draw_svg(record)).iter(f"{SVG}text")]
    assert labels.count("<script>&") == len(TREE["texts"])


@settings(max_examples=40)
@given(st.data())
def test_no_two_boxes_of_any_tree_overlap_and_all_lie_inside_the_picture(
    data: st.DataObject,
) -> None:
    size = data.draw(st.integers(1, 24))
    parents = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)]
    end = data.draw(st.integers(0, size - 1))
    path = [end]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    record = {
        "parents": parents,
        "accepted": path,
        "texts": [data.draw(st.text(max_size=6)) for _ in parents],
        "next": "next",
    }
    picture = ElementTree.fromstring(draw_svg(record))
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    boxes = []
    for box in picture.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(k, 0)) for k in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width + 1
        assert y + h <= height + 1
        boxes.append((x, y, w, h))
    assert len(boxes) == size + 1
    for i, (x, y, w, h) in enumerate(boxes):
        for u, v, s, t in boxes[:i]:
            assert x + w <= u or u + s <= x or y + h <= v or v + t <= y


def test_the_layout_puts_a_parent_in_the_middle_of_its_children() -> None:
    depth, place = layout([-1, 0, 0, 0, 2])
    assert depth == [0, 1, 1, 1, 2]
    assert place == [1.0, 0.0, 1.0, 2.0, 1.0]


def test_the_token_after_the_path_stands_below_what_grows_out_of_its_end() -> None:
    record = tree_record(tree([-1, 0, 1, 1, 0]), accept(0, 1), decode)
    boxes = list(ElementTree.fromstring(draw_svg(record)).iter(f"{SVG}rect"))
    *nodes, after = [float(box.get("y", 0)) for box in boxes]
    assert nodes[2] < nodes[1] == nodes[3] < after < nodes[4]  # children, the token, a sibling
