"""Prefix-closed trees for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from falcon_lab.trees.paths import Path


def grown(choices: list[int], deep: int = 12) -> list[Path]:
    """Each choice hangs the next child below one of the nodes so far: any tree can come out."""
    paths: list[Path] = [()]
    children = {(): 0}
    for choice in choices:
        parent = paths[choice % len(paths)]
        if len(parent) < deep:
            path = (*parent, children[parent])
            children[parent] += 1
            children[path] = 0
            paths.append(path)
    return paths[1:]


def prefix_closed(max_nodes: int = 24) -> st.SearchStrategy[list[Path]]:
    """Trees of up to ``max_nodes`` nodes; deep ones are as likely as broad ones."""
    broad = st.integers(0, 10**6)
    deep = st.integers(1, 3).map(lambda back: -back)
    return st.lists(broad | deep, max_size=max_nodes).map(grown)
