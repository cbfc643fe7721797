"""What holds for every token tree, and for every node of it.

Shapes: N tree nodes, R rows of draft distributions, k block, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.testing.standing import Grown, Standing, Tokens
from falcon_lab.testing.subject import Subject
from falcon_lab.tree import TokenTree, ancestor_matrix


def check_tree(subject: Subject, tree: TokenTree, vocabulary: int) -> None:
    """What holds for every ``TokenTree`` by itself."""
    parents, count = tree.parents.tolist(), tree.nodes
    _check_parts(subject, tree, vocabulary)
    subject.expect(
        parents[0] == -1 and all(0 <= p < node for node, p in enumerate(parents) if node),
        "TokenTree.parents",
        expected="-1 for the root, which comes first, and parents before their children",
        found=parents,
        fix="order nodes by depth",
    )
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    subject.expect(
        tree.depth.tolist() == depth,
        "TokenTree.depth",
        expected=f"the parent's and one: {depth}",
        found=tree.depth.tolist(),
        fix="count from the root, whose depth is 0",
    )
    subject.expect(
        torch.equal(tree.ancestors, ancestor_matrix(tree.parents)),
        "TokenTree.ancestors",
        expected="for every node its path to the root, itself counted",
        found=tree.ancestors.int().tolist(),
        fix="use falcon_lab.tree.ancestor_matrix(parents)",
    )
    edges = [*zip(parents[1:], tree.tokens.tolist()[1:], strict=True)]
    subject.expect(
        len(set(edges)) == len(edges),
        "siblings",
        expected="different tokens",
        found=f"(parent, token) {sorted(e for e in set(edges) if edges.count(e) > 1)} twice",
        fix="give a parent every token once: the second of two could never be reached",
    )
    if tree.routes is not None:
        routes = [sorted(set(row)) for row in tree.routes.tolist()]
        ancestors = [row.nonzero().flatten().tolist() for row in tree.ancestors]
        subject.expect(
            routes == ancestors and tree.routes.shape[0] == count,
            "TokenTree.routes",
            expected=f"the nodes from the root to each one: {ancestors}",
            found=routes,
            fix="leave routes out unless the shape is known ahead of time",
        )


def _check_parts(subject: Subject, tree: TokenTree, vocabulary: int) -> None:
    count = tree.nodes
    shapes = {"tokens": [count], "parents": [count], "depth": [count], "log_q": [count]}
    shapes["ancestors"] = [count, count]
    for name, shape in shapes.items():
        found = list(getattr(tree, name).shape)
        subject.expect(
            found == shape,
            f"the shape of TokenTree.{name}",
            expected=shape,
            found=found,
            fix="one entry a node, the root counted",
        )
    subject.expect(
        bool(((tree.tokens >= 0) & (tree.tokens < vocabulary)).all()),
        "TokenTree.tokens",
        expected=f"tokens of the vocabulary, 0 to {vocabulary - 1}",
        found=tree.tokens.tolist(),
        fix="leave out what is no token",
    )


def check_nodes(subject: Subject, done: Grown, tree: TokenTree, source: Standing) -> None:
    """Root, proposal and log-probabilities, against what the drafter said."""
    sampling = done.context.sampling
    subject.expect(
        int(tree.tokens[0]) == int(done.context.root),
        "the root",
        expected=f"the newest token, {int(done.context.root)}",
        found=int(tree.tokens[0]),
        fix="node 0 is context.root",
    )
    allowed = ("deterministic",) if sampling.greedy else ("deterministic", "sampled")
    subject.expect(
        tree.proposal in allowed,
        f"TokenTree.proposal at temperature {sampling.temperature:g}",
        expected=" or ".join(allowed),
        found=tree.proposal,
        fix="greedy rounds choose their candidates",
    )
    for node, path in enumerate(_paths(tree)):
        if node and source.finds:
            _check_found(subject, source, path)
        elif node:
            _check_node(subject, done, tree, source, node, path)


def _check_found(subject: Subject, source: Standing, path: Tokens) -> None:
    paths = source.paths() or []
    subject.expect(
        any(tuple(found[: len(path)]) == path for found in paths),
        f"the node at {path}, below the root",
        expected=f"the beginning of a path that the drafter has found: {paths}",
        found="none of them",
        fix="join paths where they begin alike, and nowhere else",
    )


def _check_node(
    subject: Subject, done: Grown, tree: TokenTree, source: Standing, node: int, path: Tokens
) -> None:
    number, row = divmod(len(path) - 1, source.block)
    stand = path[: number * source.block]
    subject.expect(
        number < len(done.asked) and stand in done.asked[number],
        f"the node at {path}, below the root",
        expected=f"a block that was expanded at {stand} in pass {number + 1}",
        found=done.asked[number] if number < len(done.asked) else "no such pass",
        fix="a node comes from the rows of the block above it, which the drafter must be asked for",
    )
    logits = source.logits(stand)
    proposed = row < len(logits) and bool(logits[row, path[-1]].isfinite())
    subject.expect(
        proposed,
        f"the node at {path}",
        expected="a token that the drafter proposes",
        found="one whose logit is -inf, or of a row that is not there",
        fix="leave out tokens that are marked so, and all that would hang below them",
    )
    if tree.proposal == "sampled":
        q = _check_q(subject, tree, node)
        expected = float(q[path[-1]].log())
    else:
        expected = float(logits[row].log_softmax(-1)[path[-1]])
    found = float(tree.log_q[node])
    subject.expect(
        abs(found - expected) < 1e-3,
        f"TokenTree.log_q of the node at {path}",
        expected=f"{expected:.4f}, from row {row} of the block at {stand}",
        found=f"{found:.4f}",
        fix="a node at depth L belongs to row (L - 1) mod k of its block",
    )


def _check_q(subject: Subject, tree: TokenTree, node: int) -> Tensor:
    """``[V]``: the distribution that a node was drawn from."""
    subject.expect(
        tree.q is not None and tree.q_row is not None,
        "a tree with proposal 'sampled'",
        expected="q and q_row",
        found="None",
        fix="give the distributions, or call chosen candidates deterministic",
    )
    assert tree.q is not None
    assert tree.q_row is not None
    row = int(tree.q_row[node])
    siblings = tree.q_row[tree.parents == tree.parents[node]]
    subject.expect(
        0 <= row < tree.q.shape[0] and bool((siblings == row).all()),
        f"TokenTree.q_row of node {node} and its siblings",
        expected="one row of q for all of them",
        found=siblings.tolist(),
        fix="siblings are drawn from one distribution without replacement",
    )
    q = tree.q[row]
    subject.expect(
        abs(float(q.sum()) - 1) < 1e-4 and bool((q >= 0).all()),
        "TokenTree.q",
        expected="probabilities",
        found=f"a sum of {float(q.sum()):.4f}",
        fix="normalise it",
    )
    return q


def _paths(tree: TokenTree) -> list[Tokens]:
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
