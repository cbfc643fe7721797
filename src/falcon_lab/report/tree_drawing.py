"""A token tree with its accepted path, as SVG and as text.

A drawn tree is a dict of plain values: ``tokens``, ``parents`` (root first, -1), ``accepted``
(node indices from the root on), ``texts`` (each node's token as text), ``next`` (the text of the
target's own token that follows), and where it is from: ``prompt``, ``method``, ``round``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from falcon_lab.interfaces import Acceptance
    from falcon_lab.tree import TokenTree

VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}

# Pixels.
ROW, GAP, PAD, HEIGHT = 26, 34, 9, 20
CHARACTER = 7.3  # width of one monospaced character at FONT
FONT = 12


def visible(text: str, limit: int = 14) -> str:
    """Token text in which white space can be seen; an empty one is ``∅``."""
    shown = "".join(VISIBLE.get(c, c if c.isprintable() else "�") for c in text)
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return shown or "∅"


class TreeRecorder:
    """Keeps the trees of one generation; hand it to an engine as ``on_round``.

    Args:
        decode: token ids -> text.
        limit: trees kept at the most.
        about: what goes with every tree: ``prompt``, ``method``.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], *, limit: int = 64, **about: Any
    ) -> None:
        self.trees: list[dict[str, Any]] = []
        self._decode = decode
        self._limit = limit
        self._about = about
        self._round = 0

    def __call__(
        self, kept: list[int], drafted: int, tree: TokenTree | None, accepted: Acceptance | None
    ) -> None:
        """Keep the round's tree, if it has one that drafts something."""
        self._round += tree is not None
        if tree is None or accepted is None or not tree.drafted or len(self.trees) >= self._limit:
            return
        record = tree_record(tree, accepted, self._decode)
        self.trees.append(record | {"round": self._round} | self._about)

    def best(self) -> dict[str, Any] | None:
        """The tree with the longest accepted path; the first of several."""
        return max(self.trees, key=lambda tree: len(tree["accepted"]), default=None)


def tree_record(
    tree: TokenTree, accepted: Acceptance, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """A verified tree as plain values, without its probes."""
    tree = tree.drafts
    tokens = tree.tokens.tolist()
    return {
        "tokens": tokens,
        "parents": tree.parents.tolist(),
        "accepted": accepted.path.tolist(),
        "texts": [decode([token]) for token in tokens],
        "next": decode([int(accepted.next_token)]),
    }


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Node -> its children, in order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def draw_text(tree: Mapping[str, Any]) -> str:
    """One node a line, indented; accepted ones are marked."""
    children, accepted = children_of(tree["parents"]), set(tree["accepted"])
    lines: list[str] = []

    def walk(node: int, depth: int) -> None:
        mark = "●" if node in accepted else "○"
        lines.append(f"{'  ' * depth}{mark} {visible(tree['texts'][node])}")
        if node == tree["accepted"][-1] and tree.get("next") is not None:
            lines.append(f"{'  ' * (depth + 1)}+ {visible(tree['next'])}")
        for child in children[node]:
            walk(child, depth + 1)

    walk(0, 0)
    return "\n".join(lines)


@dataclass(frozen=True)
class Layout:
    """Where the nodes of a tree stand.

    Attributes:
        depth: column of every node, 0 for the root.
        place: vertical place of every node, in rows.
        after: row of the token that follows the accepted path.
        rows: rows in all.
    """

    depth: list[int]
    place: list[float]
    after: int
    rows: int


def layout(parents: Sequence[int], path: Sequence[int]) -> Layout:
    """Leaves take a row each, top to bottom; a parent stands in the middle of its children.

    The token that follows the path gets a row below whatever grows out of the path's end.
    """
    children = children_of(parents)
    depth = [0] * len(parents)
    place = [0.0] * len(parents)
    rows = after = 0

    def settle(node: int) -> None:
        nonlocal rows, after
        for child in children[node]:
            depth[child] = depth[node] + 1
            settle(child)
        spots = [place[child] for child in children[node]]
        if node == path[-1]:
            after = rows
        if node == path[-1] or not spots:
            spots.append(float(rows))
            rows += 1
        place[node] = (min(spots) + max(spots)) / 2

    settle(0)
    return Layout(depth, place, after, rows)


def draw_svg(tree: Mapping[str, Any]) -> str:
    """The tree from left to right: accepted nodes filled, the target's next token dashed."""
    drawing = _Drawing(tree)
    return drawing.svg()


class _Drawing:
    """Geometry and marks of one tree."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.parents: Sequence[int] = tree["parents"]
        self.path: list[int] = list(tree["accepted"])
        self.labels = [visible(text) for text in tree["texts"]]
        self.next = visible(tree["next"]) if tree.get("next") is not None else None
        found = layout(self.parents, self.path)
        self.depth, self.rows = found.depth, found.rows
        self.y = [PAD + ROW * (p + 0.5) for p in found.place]
        self.after = PAD + ROW * (found.after + 0.5)
        self.x, self.width = self._columns()

    def _columns(self) -> tuple[list[float], float]:
        """Left edge of each depth's column (one more for the next token), and the whole width."""
        widths = [0.0] * (max(self.depth) + 2)
        for node, label in enumerate(self.labels):
            widths[self.depth[node]] = max(widths[self.depth[node]], self._box(label))
        if self.next is not None:
            after = self.depth[self.path[-1]] + 1
            widths[after] = max(widths[after], self._box(self.next))
        edges, x = [], float(PAD)
        for width in widths:
            edges.append(x)
            x += width + GAP if width else 0
        return edges, x - GAP + PAD

    @staticmethod
    def _box(label: str) -> float:
        return len(label) * CHARACTER + 2 * PAD

    def svg(self) -> str:
        """The whole picture; colours are its own, so that it also stands alone."""
        height = self.rows * ROW + 2 * PAD
        on_path = set(self.path)
        edges = [self._edge(p, n, n in on_path) for n, p in enumerate(self.parents) if p >= 0]
        edges.sort(key=lambda edge: "#1f7a4d" in edge)  # accepted ones on top
        nodes = [self._node(n, n in on_path) for n in range(len(self.parents))]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {height:.0f}" '
            f'width="{self.width:.0f}" height="{height:.0f}" role="img" '
            f'aria-label="token tree" font-family="ui-monospace, Menlo, Consolas, monospace" '
            f'font-size="{FONT}">' + "".join([*edges, *self._following(), *nodes]) + "</svg>"
        )

    def _edge(self, parent: int, node: int, accepted: bool) -> str:
        start = self.x[self.depth[parent]] + self._box(self.labels[parent])
        return self._curve(
            start,
            self.y[parent],
            self.x[self.depth[node]],
            self.y[node],
            'stroke="#1f7a4d" stroke-width="2.5"' if accepted else 'stroke="#c3c8d0"',
        )

    @staticmethod
    def _curve(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        bend = x2 - GAP / 2
        return (
            f'<path d="M{x1:.1f} {y1:.1f} H{x2 - GAP:.1f} C{bend:.1f} {y1:.1f} {bend:.1f} '
            f'{y2:.1f} {x2:.1f} {y2:.1f}" fill="none" {style}/>'
        )

    def _node(self, node: int, accepted: bool) -> str:
        style = 'fill="#1f7a4d" stroke="#1f7a4d"' if accepted else 'fill="#f5f6f8" stroke="#c3c8d0"'
        ink = "#ffffff" if accepted else "#4a5260"
        return self._label(self.x[self.depth[node]], self.y[node], self.labels[node], style, ink)

    def _following(self) -> list[str]:
        """The target's own token, below whatever grows out of the path's end."""
        if self.next is None:
            return []
        end = self.path[-1]
        x = self.x[self.depth[end] + 1]
        start = self.x[self.depth[end]] + self._box(self.labels[end])
        dashed = 'stroke="#1f7a4d" stroke-width="1.5" stroke-dasharray="4 3"'
        return [
            self._curve(start, self.y[end], x, self.after, dashed),
            self._label(x, self.after, self.next, f'fill="#ffffff" {dashed}', "#1f7a4d"),
        ]

    def _label(self, x: float, y: float, label: str, style: str, ink: str) -> str:
        return (
            f'<rect x="{x:.1f}" y="{y - HEIGHT / 2:.1f}" width="{self._box(label):.1f}" '
            f'height="{HEIGHT}" rx="5" {style}/>'
            f'<text x="{x + PAD:.1f}" y="{y + 4:.1f}" fill="{ink}" xml:space="preserve">'
            f"{escape(label)}</text>"
        )
