"""Trees as sets of paths: templates of rank paths, as written and as checked, and paths of tokens.

A node of a template is the tuple of ranks on the way from the root: ``(0, 2)`` is the third-best
candidate below the best one. The root is ``()`` and is never listed. In text a node is its rank
digits, ``"02"``; a text with a slash has one rank between slashes, so that ranks of ten and more
can be written: ``"/12"`` is the thirteenth child of the root, ``"0/12/1"`` one below ``"0/12"``.

A drafter that looks text up has whole paths of tokens; ``PathsTree`` joins them where they begin
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext, TreeBuilder
from falcon_lab.plugins.builtins import PathsTreeConfig
from falcon_lab.tree import TokenTree, listed_tree

Path = tuple[int, ...]
"""Ranks from the root to a node."""


def path_name(path: Path) -> str:
    """Return the text of a node, as ``parse_node`` reads it."""
    if not path:
        return "the root"
    if max(path) < 10:
        return "".join(map(str, path))
    return "/" * (len(path) == 1) + "/".join(map(str, path))


def parse_node(node: Any) -> Path:
    """Read a node from text or from a sequence of ranks.

    Raises:
        FalconLabError: it is neither.
    """
    if isinstance(node, str):
        parts = [part for part in node.split("/") if part] if "/" in node else list(node)
        if all(part.isdecimal() for part in parts):
            return tuple(int(part) for part in parts)
    elif isinstance(node, Sequence) and all(_is_count(rank) for rank in node):
        return tuple(node)
    quote = " (quote it, so that YAML keeps its zeros)" if _is_count(node) else ""
    raise FalconLabError(
        f"tree node {node!r} is not understood{quote}: write its rank digits, like '02', or ranks "
        "between slashes, like '0/12'"
    )


def from_child_counts(counts: Mapping[Any, Any]) -> tuple[Path, ...]:
    """Turn ``{"": 3, "0": 2}`` into the checked template with nodes 0, 1, 2, 00 and 01.

    Raises:
        FalconLabError: a node is written twice, has no parent, or its count is no count.
    """
    known: dict[Path, int] = {}
    for node, count in counts.items():
        path = parse_node(node)
        if path in known:
            raise FalconLabError(f"tree node {path_name(path)} has two child counts; keep one")
        if not _is_count(count):
            raise FalconLabError(
                f"tree node {path_name(path)} has {count!r} children; give a count"
            )
        known[path] = count
    for path in known:
        if path and path[-1] >= known.get(path[:-1], 0):
            _refuse_orphan(path)
    return checked((*path, rank) for path, count in known.items() for rank in range(count))


def checked(nodes: Iterable[Any]) -> tuple[Path, ...]:
    """Check nodes, and order them by (depth, path).

    Raises:
        FalconLabError: naming the node that is listed twice, has no parent, or follows a gap in
            its parent's ranks (they must be 0..n-1).
    """
    paths: set[Path] = set()
    for node in nodes:
        path = parse_node(node)
        if not path:
            raise FalconLabError("the root is in every tree; leave it out of the list of nodes")
        if path in paths:
            raise FalconLabError(f"tree node {path_name(path)} is listed twice")
        paths.add(path)
    ordered = tuple(sorted(paths, key=lambda path: (len(path), path)))
    for path in ordered:
        if len(path) > 1 and path[:-1] not in paths:
            _refuse_orphan(path)
        if path[-1] and (*path[:-1], path[-1] - 1) not in paths:
            raise FalconLabError(
                f"tree node {path_name(path)} follows a gap: {path_name(path[:-1])} has no child "
                f"of rank {path[-1] - 1}; children must have ranks 0, 1, 2, …"
            )
    return ordered


def _refuse_orphan(path: Path) -> None:
    raise FalconLabError(
        f"tree node {path_name(path)} is an orphan: {path_name(path[:-1])} is not in the tree or "
        "has too few children"
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class PathsTree(TreeBuilder):
    """Build trees of the paths that a drafter has looked up, in one pass.

    Nodes are deterministic: a lookup has no probabilities, and at T > 0 a token is
    accepted with the target's own (one-hot) rule.

    Args:
        config: the size.
        context: not needed.
    """

    def __init__(self, config: PathsTreeConfig, context: BuildContext) -> None:
        del context
        self.max_depth = config.depth
        self.max_nodes = config.nodes + 1

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._root = context.root
        self._depth, self._nodes = context.budget.limit(
            depth=self.max_depth, nodes=self.max_nodes - 1, block=self.max_depth
        )
        self._tokens: list[int] = []  # of the drafts: node i is entry i - 1
        self._parents: list[int] = []
        if self._depth < 1 or self._nodes < 1:
            return None
        return Frontier.root(context.root.device)

    def grow(self, output: DraftOutput) -> None:
        """Take in the paths.

        Raises:
            FalconLabError: the drafter predicts tokens and has no paths.
        """
        if output.paths is None:
            raise FalconLabError(
                "tree 'paths' is made of the paths that a drafter has found, and this one predicts "
                "tokens instead; choose chain, static, dynamic or optimal"
            )
        children: dict[tuple[int, int], int] = {}
        for path in output.paths:
            self._add(path, children)

    def finish(self) -> TokenTree:
        """Return the tree of the paths, those with a common beginning joined."""
        return listed_tree(self._root, self._tokens, self._parents, [0.0] * len(self._tokens))

    def _add(self, path: Sequence[int], children: dict[tuple[int, int], int]) -> None:
        """Add what is new of a path; ``children`` are the nodes by parent and token."""
        node = 0
        for token in path[: self._depth]:
            known = children.get((node, token))
            if known is None:
                if len(self._tokens) == self._nodes:
                    return
                self._tokens.append(token)
                known = children[node, token] = len(self._tokens)
                self._parents.append(node)
            node = known
