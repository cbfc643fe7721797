"""A token tree with its accepted path, as SVG and as text.

A drawn tree is a dict of plain values: ``tokens``, ``parents`` (root first, -1), ``accepted``
(node indices from the root on), ``texts`` (each node's token as text), ``next`` (the text of the
target's own token that follows), and where it is from: ``prompt``, ``method``, ``round``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

GREEN, GREY = "#1f7a4d", "#c3c8d0"
DASHED = f'stroke="{GREEN}" stroke-width="1.5" stroke-dasharray="4 3"'
BOXES = {  # kind of node -> style of its box, colour of its text
    "accepted": (f'fill="{GREEN}" stroke="{GREEN}"', "#ffffff"),
    "next": (f'fill="#ffffff" {DASHED}', GREEN),
    "rejected": (f'fill="#f5f6f8" stroke="{GREY}"', "#4a5260"),
}
EDGES = {  # kind of the node that it leads to -> style
    "rejected": f'stroke="{GREY}"',
    "next": DASHED,
    "accepted": f'stroke="{GREEN}" stroke-width="2.5"',
}
"""In the order in which they are drawn: accepted edges lie on top."""


def visible(text: str, limit: int = 14) -> str:
    """Return token text in which white space can be seen; an empty one is ``∅``."""
    shown = "".join(VISIBLE.get(c, c if c.isprintable() else "�") for c in text)
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    return shown or "∅"


class TreeRecorder:
    """Records the trees of one generation; an engine calls it as ``on_round``.

    Args:
        decode: token ids -> text.
        limit: the most trees that are recorded.
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
        self, tokens: list[int], drafted: int, tree: TokenTree | None, accepted: Acceptance | None
    ) -> None:
        """Record the round's tree, if it has one that drafts something."""
        self._round += tree is not None
        if tree is None or accepted is None or not tree.drafted or len(self.trees) >= self._limit:
            return
        record = tree_record(tree, accepted, self._decode)
        self.trees.append(record | {"round": self._round} | self._about)

    def best(self) -> dict[str, Any] | None:
        """Return the tree with the longest accepted path; the first of several."""
        return max(self.trees, key=lambda tree: len(tree["accepted"]), default=None)


def tree_record(
    tree: TokenTree, accepted: Acceptance, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Return a verified tree as plain values, without its auxiliary nodes."""
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
    """Return the children of every node, in order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def draw_text(tree: Mapping[str, Any]) -> str:
    """Write one node a line, indented; accepted ones are marked."""
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


def layout(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """Place the nodes of a tree.

    Leaves take a row each, top to bottom; a parent stands in the middle of its children.

    Args:
        parents: of every node; the root, -1, comes first.

    Returns:
        The depth of every node, and its vertical place in rows.
    """
    children = children_of(parents)
    depth, place = [0] * len(parents), [0.0] * len(parents)
    rows = 0

    def settle(node: int) -> None:
        nonlocal rows
        for child in children[node]:
            depth[child] = depth[node] + 1
            settle(child)
        if children[node]:
            place[node] = (place[children[node][0]] + place[children[node][-1]]) / 2
        else:
            place[node] = float(rows)
            rows += 1

    settle(0)
    return depth, place


def draw_svg(tree: Mapping[str, Any]) -> str:
    """Draw the tree from left to right: accepted nodes filled, the target's next token dashed.

    The next token is a last child of the accepted path's end. Colours are the picture's own, so
    that it also stands alone.
    """
    parents, path = list(tree["parents"]), list(tree["accepted"])
    labels = [visible(text) for text in tree["texts"]]
    kinds = ["accepted" if node in path else "rejected" for node in range(len(parents))]
    if tree.get("next") is not None:
        parents.append(path[-1])
        labels.append(visible(tree["next"]))
        kinds.append("next")
    depth, place = layout(parents)
    widths = [len(label) * CHARACTER + 2 * PAD for label in labels]
    left = [float(PAD)]  # of the column of every depth, and of one more
    for level in range(max(depth) + 1):
        column = (width for width, at in zip(widths, depth, strict=True) if at == level)
        left.append(left[-1] + max(column) + GAP)
    x, y = [left[at] for at in depth], [PAD + ROW * (row + 0.5) for row in place]
    edges = [
        _edge(x[parent] + widths[parent], y[parent], x[node], y[node], style)
        for kind, style in EDGES.items()
        for node, parent in enumerate(parents)
        if parent >= 0 and kinds[node] == kind
    ]
    boxes = [
        _box(x[node], y[node], widths[node], labels[node], *BOXES[kind])
        for node, kind in enumerate(kinds)
    ]
    width, height = left[-1] - GAP + PAD, (max(place) + 1) * ROW + 2 * PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="token tree" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}">'
        + "".join([*edges, *boxes])
        + "</svg>"
    )


def _edge(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    bend = x2 - GAP / 2
    return (
        f'<path d="M{x1:.1f} {y1:.1f} H{x2 - GAP:.1f} C{bend:.1f} {y1:.1f} {bend:.1f} '
        f'{y2:.1f} {x2:.1f} {y2:.1f}" fill="none" {style}/>'
    )


def _box(x: float, y: float, width: float, label: str, style: str, ink: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y - HEIGHT / 2:.1f}" width="{width:.1f}" height="{HEIGHT}" rx="5" '
        f'{style}/><text x="{x + PAD:.1f}" y="{y + 4:.1f}" fill="{ink}" xml:space="preserve">'
        f"{escape(label)}</text>"
    )
