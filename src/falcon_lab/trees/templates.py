"""The templates that ship, and how to compute one from a model of acceptance.

Names: ``vicuna`` and ``llama`` are the paper's (k = 2); ``k3`` and ``k4`` are ours, of the heights
that the paper gives but does not draw; ``k2-16`` is a tree for k = 2 with 16 nodes, ``k2-16-d4``
one of depth 4 at the most, and ``auto`` is ``k<block>-16``.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.trees.paths import Path, checked, from_child_counts

VICUNA = """
:19 0:10 1:2 2:2 3:1
00:10 01:2 02:2 10:2 20:1 30:1
000:10 001:2 002:1 010:2 011:1 020:1 021:1 100:2 200:1 300:1
0000:10 0001:2 0002:1 0010:1 0020:1 0100:1 0200:1 1000:1 2000:1 3000:1
00000:10 00001:2 00002:1 00010:1 00011:1 00020:1 00100:1 00200:1 01000:1 02000:1 10000:1 20000:1
000000:7 000001:2 000002:1 000010:1 000100:1 001000:1 002000:1 010000:1 020000:1 100000:1 200000:1
0000000:12 0000010:1 0000011:1 0000020:1 0001000:1 0010000:1 0020000:1 0100000:1 0200000:1
1000000:1 2000000:1
"""
"""Figure 5 of arXiv 2412.12639, node:children. 156 nodes, k = 2. The figure shows 19 children of
the root where the text says 20."""

LLAMA = """
:20 0:11 1:4 2:4
00:7 01:10 02:1 03:1 10:1 20:1
000:10 010:1 020:1 030:1 100:1 200:1
0000:8 0001:1 0100:1 0200:1 0300:1 1000:1 2000:1
00000:4 00010:1 01000:1 02000:1 03000:1 10000:1 20000:1
000000:4 000100:1 010000:1 020000:1 030000:1 100000:1 200000:1
0000000:3 0001000:1 0100000:1 0200000:1 0300000:1 1000000:1 2000000:1
"""
"""Figure 6 of arXiv 2412.12639 made free of gaps: the official code's ``kmask2_8layer_tree_7``.
118 nodes, k = 2. The figure gives node 01 children of ranks 0 and 3 to 9 (read as 0 to 7 by that
code) and node 0000 ten."""

RANK_PROBABILITIES = (0.84, 0.07, 0.025, 0.013, 0.009, 0.007, 0.006, 0.005, 0.004, 0.003)
"""Chance that the target's token is the drafter's first, second, … candidate, given that the path
so far is right. The first ranks are what Falcon (k = 2) showed on ``tiny-code`` along the path of
first candidates (ten validation prompts, greedy, 850 nodes); the tail is smoothed."""

SLOT_DECAY = 0.95
"""How much less often each later row of a block is taken to be right."""


def path_probability(
    path: Path,
    block: int,
    rank_probabilities: Sequence[float] = RANK_PROBABILITIES,
    slot_decay: float = SLOT_DECAY,
) -> float:
    """Return the chance of a whole path: Π over levels L of p[rank]·decay^((L - 1) mod k)."""
    last = len(rank_probabilities) - 1
    return math.prod(
        rank_probabilities[min(rank, last)] * slot_decay ** (level % block)
        for level, rank in enumerate(path)
    )


def expected_tree(
    block: int,
    depth: int,
    nodes: int,
    rank_probabilities: Sequence[float] = RANK_PROBABILITIES,
    slot_decay: float = SLOT_DECAY,
) -> tuple[Path, ...]:
    """Return the tree of ``nodes`` nodes with the most expected accepted tokens.

    The expectation is the sum of ``path_probability`` over the nodes, and a node is never likelier
    than its parent or than a sibling of a lower rank; so taking the likeliest nodes first is
    optimal, and what is taken is prefix-closed and free of gaps. Ties go to the shallower node,
    then to the lower ranks.

    Args:
        block: k.
        depth: longest path.
        nodes: nodes, the root not counted.
        rank_probabilities: must not rise; ranks beyond its end get its last value.
        slot_decay: in (0, 1].

    Raises:
        ValueError: probabilities rise, or the decay lies outside of (0, 1].
    """
    if list(rank_probabilities) != sorted(rank_probabilities, reverse=True):
        raise ValueError(f"rank probabilities must not rise: {list(rank_probabilities)}")
    if not 0 < slot_decay <= 1:
        raise ValueError(f"slot_decay must lie in (0, 1], got {slot_decay}")

    def entry(path: Path) -> tuple[float, int, Path]:
        return (-path_probability(path, block, rank_probabilities, slot_decay), len(path), path)

    heap = [entry((0,))] if depth > 0 else []
    taken: list[Path] = []
    while heap and len(taken) < nodes:
        path = heapq.heappop(heap)[-1]
        taken.append(path)
        heapq.heappush(heap, entry((*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(heap, entry((*path, 0)))
    return checked(taken)


def cut(
    paths: Sequence[Path], block: int, depth: int | None = None, nodes: int | None = None
) -> tuple[Path, ...]:
    """Cut a tree to a budget: its likeliest nodes, prefix-closed and free of gaps."""
    kept = [path for path in paths if depth is None or len(path) <= depth]
    if nodes is not None and nodes < len(kept):
        kept.sort(key=lambda path: (-path_probability(path, block), len(path), path))
        kept = kept[:nodes]
    return checked(kept)


def default_depth(block: int) -> int:
    """Return the height of a small tree, two to four passes (in the paper 6 and 8 for k = 3, 4)."""
    return {1: 4, 2: 6}.get(block, 2 * block)


def figure_tree(name: str) -> tuple[Path, ...]:
    """Return ``vicuna`` or ``llama``, as the paper's figures have them."""
    entries = (VICUNA if name == "vicuna" else LLAMA).split()
    return from_child_counts({n: int(c) for n, c in (entry.split(":") for entry in entries)})


def vicuna(config: None, context: BuildContext) -> tuple[Path, ...]:
    """Return the template of Figure 5."""
    return figure_tree("vicuna")


def llama(config: None, context: BuildContext) -> tuple[Path, ...]:
    """Return the template of Figure 6."""
    return figure_tree("llama")


@lru_cache
def named(name: str, block: int, deepest: int | None = None) -> tuple[Path, ...]:
    """Return a template that ships.

    Args:
        name: of it.
        block: k, which ``auto`` goes by.
        deepest: longest path that a round can draft, which trees drawn to size respect.

    Raises:
        FalconLabError: there is none of that name.
    """

    def drawn(k: int, depth: int, nodes: int) -> tuple[Path, ...]:
        return expected_tree(k, depth if deepest is None else min(depth, deepest), nodes)

    if name in ("vicuna", "llama"):
        return figure_tree(name)
    if name in ("k3", "k4"):
        return drawn(int(name[1]), 2 * int(name[1]), nodes=120)
    if match := re.fullmatch(r"k([1-9]\d*)-([1-9]\d*)(?:-d([1-9]\d*))?", name):
        k, nodes = int(match[1]), int(match[2])
        return drawn(k, int(match[3] or default_depth(k)), nodes)
    if name == "auto":
        return drawn(block, default_depth(block), nodes=16)
    raise FalconLabError(
        f"tree template {name!r} does not exist; choose auto, vicuna, llama, k3, k4, a name like "
        "k2-16 (k = 2, 16 nodes) or k2-16-d4 (of depth 4), one that a plug-in registers "
        "(falcon-lab plugins), or write the tree out"
    )


def resolve(template: Any, context: BuildContext) -> tuple[Path, ...]:
    """Turn a template as a configuration holds it into checked rank paths.

    Args:
        template: the name of a shipped or a registered template, a mapping from node to child
            count, or a list of nodes.
        context: gives k, what the drafter can reach, and the registered templates.

    Raises:
        FalconLabError: it is none of these, or the tree has duplicates, gaps or orphans.
    """
    if isinstance(template, str):
        known = context.components
        if known is None or not known.knows("template", template):
            return named(template, context.block, context.deepest)
        drawn = known.build("template", {"name": template}, context)
        try:
            return _drawn(drawn)
        except FalconLabError as error:
            owner = known.owner("template", template)
            raise FalconLabError(f"tree template {template!r} of {owner}: {error}") from error
    return _drawn(template)


def _drawn(template: Any) -> tuple[Path, ...]:
    """Return the rank paths of a tree that is written out."""
    if isinstance(template, Mapping):
        return from_child_counts(template)
    if isinstance(template, Sequence):
        return checked(template)
    raise FalconLabError(
        f"tree template {template!r} is not understood: give a name, a mapping from node to child "
        "count, or a list of nodes"
    )
