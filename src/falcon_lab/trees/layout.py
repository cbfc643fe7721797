"""The buffers of a template: which candidate every node is, and what every pass expands.

The rule behind all of it (Falcon, arXiv 2412.12639, §3.4, written for any k): a node at depth L
has its candidate from row (L - 1) mod k of the block that was expanded at its ancestor of depth
⌊(L - 1) / k⌋·k. The rows of one block come from one pass, so nodes below different children of a
block's node share their candidates. A block is expanded only where a node has children.

Shapes: N nodes (the root counted), F blocks of a pass, k block, m candidates of a row, n nodes that
a pass decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from falcon_lab.tree import ancestor_matrix
from falcon_lab.trees.paths import Path, checked


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Describe one drafter pass: what it reads, and the nodes that it decides.

    Attributes:
        first: first node that the pass decides; they are contiguous.
        last: one past the last.
        width: m, candidates that are needed of each row.
        stands: ``[F]`` node at which each block stands.
        path: ``[F, k]`` nodes whose tokens each block reads (``[1, 0]`` in the first pass).
        parents: ``[F]`` index, in the pass before, of the block that each one grew out of; -1 for
            the root.
        slots: ``[n]`` index of each node's candidate in the pass's flattened ``[F, k, m]``.
        rows: ``[n]`` index of the row of each node's candidate in the flattened ``[F, k]``.
    """

    first: int
    last: int
    width: int
    stands: Tensor
    path: Tensor
    parents: Tensor
    slots: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold a template and a block size as index tensors.

    Attributes:
        block: k.
        paths: rank path of every node, the root ``()`` first, ordered by (depth, path).
        parents: ``[N]`` long, -1 for the root.
        depth: ``[N]`` long.
        ancestors: ``[N, N]`` bool, a node counted among its own.
        routes: ``[N, D + 1]`` long, the nodes from the root to each one, itself repeated to fill
            up; D is the height.
        passes: the drafter's passes, ⌈height / k⌉ of them.
    """

    block: int
    paths: tuple[Path, ...]
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    routes: Tensor
    passes: tuple[PassLayout, ...]

    def to(self, device: torch.device) -> Layout:
        """Return the same buffers on another device."""
        moved = _moved(self, device)
        return Layout(
            **moved | {"passes": tuple(PassLayout(**_moved(p, device)) for p in self.passes)}
        )


def build_layout(nodes: Iterable[Any], block: int) -> Layout:
    """Build every buffer of any prefix-closed tree, for any k >= 1.

    Args:
        nodes: rank paths without the root, in any order (none: the root alone).
        block: k, tokens per drafter pass.

    Raises:
        FalconLabError: the tree has duplicates, gaps or orphans.
        ValueError: k is less than 1.
    """
    if block < 1:
        raise ValueError(f"a block has at least one token, not {block}")
    paths: tuple[Path, ...] = ((), *checked(nodes))
    number = {path: node for node, path in enumerate(paths)}
    parents = torch.tensor([number[path[:-1]] if path else -1 for path in paths])
    passes = []
    before: list[Path] = []
    for start in range(0, len(paths[-1]), block):
        members = [path for path in paths if start < len(path) <= start + block]
        blocks = sorted({path[:start] for path in members})
        passes.append(_pass_layout(members, blocks, before, number, block, start))
        before = blocks
    depth = torch.tensor([len(path) for path in paths])
    routes = [
        [number[path[: min(step, len(path))]] for step in range(len(paths[-1]) + 1)]
        for path in paths
    ]
    return Layout(
        block,
        paths,
        parents,
        depth,
        ancestor_matrix(parents),
        torch.tensor(routes),
        tuple(passes),
    )


def _pass_layout(
    members: list[Path],
    blocks: list[Path],
    before: list[Path],
    number: dict[Path, int],
    block: int,
    start: int,
) -> PassLayout:
    """Build the pass that decides ``members``, which lie below ``blocks`` at depth ``start``."""
    width = 1 + max(path[-1] for path in members)
    place = {path: index for index, path in enumerate(blocks)}
    rows = [place[path[:start]] * block + (len(path) - 1) % block for path in members]
    read = range(start - block + 1, start + 1) if start else range(0)
    return PassLayout(
        first=number[members[0]],
        last=number[members[-1]] + 1,
        width=width,
        stands=torch.tensor([number[path] for path in blocks]),
        path=torch.tensor([[number[path[:d]] for d in read] for path in blocks], dtype=torch.long),
        parents=torch.tensor([before.index(p[: start - block]) if start else -1 for p in blocks]),
        slots=torch.tensor(
            [row * width + path[-1] for row, path in zip(rows, members, strict=True)]
        ),
        rows=torch.tensor(rows),
    )


def _moved(buffers: Layout | PassLayout, device: torch.device) -> dict[str, Any]:
    values = {field.name: getattr(buffers, field.name) for field in fields(buffers)}
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()}
