"""The check of a tree builder.

Shapes: N tree nodes, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from falcon_lab.acceptance import SamplingRule
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, BuildContext, DraftVocabulary, RoundContext
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.testing.decoding import engine, expect_greedy, expect_whole
from falcon_lab.testing.parted_trees import check_sampled as check_parted_sampling
from falcon_lab.testing.parted_trees import one_round, parts_of, sources_of
from falcon_lab.testing.reference import (
    DraftRound,
    ReferenceDrafter,
    ReferenceLogits,
    Tokens,
    TokenTable,
    expect_distribution,
    grow,
)
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe
from falcon_lab.tree import TokenTree, ancestor_matrix

VOCABULARY = 12
ROOT = 7
ROUNDS = 800
"""Sampled rounds of the statistical test."""

SOURCES: tuple[dict[str, Any], ...] = ({}, {"unproposed": 0.6}, {"unproposed": 1.0}, {"rows": 0})
"""Drafters that say everything, something, nothing, or have no rows at all."""

WORDS = 7
"""Tokens of a draft vocabulary."""


def check_tree_builder(
    builder: Recipe, *, blocks: Sequence[int] = (1, 2, 3), seed: int = 0
) -> None:
    """Check that a tree builder does what its kind requires, with drafters of several block sizes.

    - Its frontiers are what ``Frontier`` says, and its trees what ``TokenTree`` says: the root
      first, parents before children, no token twice among siblings, nothing that the drafter does
      not propose, and every node's ``log_q`` from the row that it belongs to. Where a drafter has
      a draft vocabulary, nodes are the target's tokens all the same.
    - A budget is kept, whatever of depth, nodes and passes it limits; ``max_depth`` and
      ``max_nodes`` are never exceeded, nor what the drafter reaches (``BuildContext.max_passes``).
    - A round may be broken off after any pass, and the next one knows nothing of it.
    - Sampled trees carry the distributions that their nodes were drawn from, and these are true:
      with rejection sampling the output follows the target. The generator alone draws.
    - Greedy text with it is the target's own.
    - One for several drafters (``BuildContext.parts``) is driven by so many: its trees are such,
      keep to the budget, and output that is sampled with them follows the target.

    Args:
        builder: a YAML node, or what makes a tree builder from a ``BuildContext``.
        blocks: k of the drafters that it is for.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("tree_builder", builder, seed)
    target = tiny_target(vocab=VOCABULARY, positions=48)
    for block in blocks:
        if (parted := parts_of(tested, target, block)) is not None:
            with tested.checking(f"trees of several drafters with blocks of {block}"):
                check_parts(tested, target, parted)
            continue
        has_paths = needs_paths(tested, target, block)
        with tested.checking(f"its trees for blocks of {block}"):
            check_limits(tested, target, block, has_paths=has_paths)
            check_rounds(tested, target, block, has_paths=has_paths)
        with tested.checking(f"sampled trees for blocks of {block}"):
            if not has_paths:  # one with paths draws nothing
                check_sampled(tested, target, block, narrow=block == blocks[-1])
        with tested.checking(f"decoding with blocks of {block}"):
            check_decoding(tested, target, block, has_paths=has_paths)


def check_parts(tested: ComponentUnderTest, target: Target, context: BuildContext) -> None:
    """Check a builder whose tree is grown by several drafters."""
    made = tested.build(context)
    for number, (_, budget, temperature) in enumerate(_rounds(made, context.block, [{}])):
        sources = sources_of(context, VOCABULARY, tested.seed + number)

        def grown(
            passes: int = 99,
            sources: Sequence[ReferenceLogits] = sources,
            asked: tuple[Budget, Sampling] = (budget, Sampling(temperature)),
            number: int = number,
        ) -> TokenTree:
            drawn = RoundContext(torch.tensor(ROOT), *asked, tested.generator(number))
            return one_round(tested, context, sources, drawn, passes)

        whole, again = grown(), grown()
        for tree in (whole, grown(1)):
            check_tree(tested, tree, VOCABULARY)
            tested.expect(
                int(tree.tokens[0]) == ROOT,
                "the root",
                expected=f"the newest token, {ROOT}",
                found=int(tree.tokens[0]),
                fix="node 0 is context.root",
            )
        tested.expect(
            torch.equal(whole.tokens, again.tokens) and torch.equal(whole.parents, again.parents),
            "a round of several drafters made again with the same generator",
            expected=f"the same tree {whole.tokens.tolist()}",
            found=again.tokens.tolist(),
            fix="begin every round anew in start(), and draw from context.generator alone",
        )
    check_parted_sampling(tested, target, context, ROOT, VOCABULARY)


def check_limits(
    tested: ComponentUnderTest, target: Target, block: int, *, has_paths: bool = False
) -> None:
    """Check ``max_depth``, ``max_nodes`` and what a drafter reaches."""
    for passes in (None, 1, 2):
        made = tested.build(BuildContext(target, block, passes))
        limits = made.max_depth, made.max_nodes
        tested.expect(
            all(isinstance(each, int) for each in limits) and limits[0] >= 0 and limits[1] >= 1,
            "max_depth and max_nodes",
            expected="whole numbers, at least 0 and 1 (the root)",
            found=limits,
            fix="set both in __init__",
        )
        most = None if passes is None or has_paths else passes * block
        tested.expect(
            most is None or made.max_depth <= most,
            f"max_depth for a drafter of {passes} passes of {block} tokens",
            expected=f"at most {most}",
            found=made.max_depth,
            fix="cut the depth by context.reach(depth)",
        )


def needs_paths(tested: ComponentUnderTest, target: Target, block: int) -> bool:
    """Whether its trees are made of whole paths: without them it refuses a pass by an error."""
    made = tested.build(BuildContext(target, block))
    context = RoundContext(torch.tensor(ROOT), Budget(), Sampling(), tested.generator())
    try:
        grow(made, ReferenceLogits(VOCABULARY, block, tested.seed), context)
    except FalconLabError:
        return True
    return False


def check_rounds(
    tested: ComponentUnderTest, target: Target, block: int, *, has_paths: bool = False
) -> None:
    """Check every tree of rounds of all kinds."""
    made = tested.build(BuildContext(target, block))
    sources = (*SOURCES, {"words": draft_vocabulary(tested, target)})
    for number, (options, budget, temperature) in enumerate(_rounds(made, block, sources)):
        source = ReferenceLogits(
            VOCABULARY, block, tested.seed + number, has_paths=has_paths, **options
        )
        whole = _round(tested, made, source, budget, temperature, number)
        for passes in range(len(whole.expanded) if number % 3 == 0 else 0):
            _round(tested, made, source, budget, temperature, number, passes + 1)
        again = _round(tested, made, source, budget, temperature, number)
        assert whole.tree is not None
        assert again.tree is not None
        tested.expect(
            torch.equal(again.tree.tokens, whole.tree.tokens)
            and torch.equal(again.tree.parents, whole.tree.parents),
            "a round made again with the same generator",
            expected=f"the same tree {whole.tree.tokens.tolist()}",
            found=again.tree.tokens.tolist(),
            fix="begin every round anew in start(), and draw from context.generator alone",
        )


def draft_vocabulary(tested: ComponentUnderTest, target: Target) -> DraftVocabulary:
    """Make a draft vocabulary of any tokens."""
    counts = torch.randperm(target.vocab_size, generator=tested.generator(62))
    return DraftVocabulary(target, WORDS, counts)


def _rounds(
    made: Any, block: int, sources: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], Budget, float]]:
    depths = (None, 0, 1, block, block + 1, made.max_depth, made.max_depth + 3)
    nodes = (None, 0, 1, 2, made.max_nodes - 1, made.max_nodes + 5)
    passes = (None, 0, 1, 2)
    budgets = [Budget(depth=depth) for depth in depths]
    budgets += [Budget(nodes=node) for node in nodes] + [Budget(passes=each) for each in passes]
    budgets += [Budget(2, 3, 1), Budget(block + 1, 4, 2)]
    for options, temperature in product(sources, (0.0, 1.0)):
        for budget in budgets if not options else budgets[:1] + budgets[-2:]:
            yield options, budget, temperature


def _round(
    tested: ComponentUnderTest,
    made: Any,
    source: ReferenceLogits,
    budget: Budget,
    temperature: float,
    number: int,
    passes: int = 99,
) -> DraftRound:
    context = RoundContext(
        torch.tensor(ROOT), budget, Sampling(temperature), tested.generator(number)
    )
    done = grow(made, source, context, passes)
    tested.expect(
        not done.problem,
        "a frontier",
        expected="what interfaces.Frontier says",
        found=done.problem,
        fix="tokens are the k draft tokens from one block to the next, parents count the blocks "
        "of the pass before, and None ends the round",
    )
    assert done.tree is not None
    _check_budget(tested, made, done, done.tree, source)
    check_tree(tested, done.tree, VOCABULARY)
    check_nodes(tested, done, done.tree, source, made.shared_suffix)
    return done


def _check_budget(
    tested: ComponentUnderTest,
    made: Any,
    done: DraftRound,
    tree: TokenTree,
    source: ReferenceLogits,
) -> None:
    budget, deepest = done.context.budget, int(tree.depth.max())
    limits = [
        ("tree.depth.max()", deepest, "max_depth", made.max_depth),
        ("tree.nodes", tree.nodes, "max_nodes", made.max_nodes),
        ("tree.depth.max()", deepest, "the budget's depth", budget.depth),
        ("tree.drafted", tree.drafted, "the budget's nodes", budget.nodes),
        ("the passes asked for", len(done.expanded), "the budget's passes", budget.passes),
    ]
    if not source.has_paths and made.shared_suffix is None:
        reach = len(done.expanded) * source.block
        limits.append(("tree.depth.max()", deepest, "k a pass", reach))
    for what, found, limit, most in limits:
        tested.expect(
            most is None or found <= most,
            f"{what} in a round of {budget}",
            expected=f"at most {most}, {limit}",
            found=found,
            fix="cut the tree by context.budget.limit(depth=…, nodes=…, block=…)",
        )


def check_sampled(
    tested: ComponentUnderTest, target: Target, block: int, *, narrow: bool = False
) -> None:
    """Check that a sampled tree carries the distributions that it was drawn from.

    Args:
        tested: the tree builder.
        target: gives its tokens.
        block: k.
        narrow: the drafter has a draft vocabulary.
    """
    made = tested.build(BuildContext(target, block))
    words = draft_vocabulary(tested, target) if narrow else None
    source = ReferenceLogits(VOCABULARY, block, tested.seed, words=words)
    tokens = TokenTable(VOCABULARY, tested.generator(60))
    sampling, generator = Sampling(1.0, top_k=4), tested.generator(61)
    rule = SamplingRule(None, BuildContext(target, block))
    texts: list[list[int]] = []
    while len(texts) < ROUNDS:
        context = RoundContext(torch.tensor(ROOT), Budget(), sampling, generator)
        tree = grow(made, source, context).tree
        assert tree is not None
        if tree.proposal != "sampled":
            return  # whatever was chosen is accepted without looking at how
        found = rule(tree, tokens.logits(tree), sampling, generator)
        texts.append(tokens.text(tree, found, sampling, generator))
    expect_distribution(
        tested,
        "sampled output with its trees",
        torch.tensor(texts),
        tokens.exact(ROOT, sampling),
        "q must be the distribution that siblings were drawn from, in their order and without "
        "replacement; candidates that were chosen are deterministic",
    )


def check_decoding(
    tested: ComponentUnderTest, target: Target, block: int, *, has_paths: bool = False
) -> None:
    """Check greedy text that is decoded with the builder."""
    drafter = ReferenceDrafter(target.vocab_size, block, has_paths=has_paths)
    tree = tested.build(BuildContext.of(target, drafter))
    made = engine(target, drafter, tree=tree, components=tested.components)
    expect_greedy(tested, target, made, f"its trees and blocks of {block}")
    expect_whole(tested, target, made, f"its trees and blocks of {block}")


def check_tree(tested: ComponentUnderTest, tree: TokenTree, vocabulary: int) -> None:
    """Check what holds for every single ``TokenTree``."""
    parents, count = tree.parents.tolist(), tree.nodes
    _check_parts(tested, tree, vocabulary)
    tested.expect(
        parents[0] == -1 and all(0 <= p < node for node, p in enumerate(parents) if node),
        "TokenTree.parents",
        expected="-1 for the root, which comes first, and parents before their children",
        found=parents,
        fix="order nodes by depth",
    )
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    tested.expect(
        tree.depth.tolist() == depth,
        "TokenTree.depth",
        expected=f"the parent's and one: {depth}",
        found=tree.depth.tolist(),
        fix="count from the root, whose depth is 0",
    )
    tested.expect(
        torch.equal(tree.ancestors, ancestor_matrix(tree.parents)),
        "TokenTree.ancestors",
        expected="for every node its path to the root, itself counted",
        found=tree.ancestors.int().tolist(),
        fix="use falcon_lab.tree.ancestor_matrix(parents)",
    )
    edges = [*zip(parents[1:], tree.tokens.tolist()[1:], strict=True)]
    tested.expect(
        len(set(edges)) == len(edges),
        "siblings",
        expected="different tokens",
        found=f"(parent, token) {sorted(e for e in set(edges) if edges.count(e) > 1)} twice",
        fix="give a parent every token once: the second of two could never be reached",
    )
    if tree.routes is not None:
        routes = [sorted(set(row)) for row in tree.routes.tolist()]
        ancestors = [row.nonzero().flatten().tolist() for row in tree.ancestors]
        tested.expect(
            routes == ancestors and tree.routes.shape[0] == count,
            "TokenTree.routes",
            expected=f"the nodes from the root to each one: {ancestors}",
            found=routes,
            fix="leave routes out unless the shape is known ahead of time",
        )


def _check_parts(tested: ComponentUnderTest, tree: TokenTree, vocabulary: int) -> None:
    count = tree.nodes
    shapes = {"tokens": [count], "parents": [count], "depth": [count], "log_q": [count]}
    shapes["ancestors"] = [count, count]
    for name, shape in shapes.items():
        found = list(getattr(tree, name).shape)
        tested.expect(
            found == shape,
            f"the shape of TokenTree.{name}",
            expected=shape,
            found=found,
            fix="one entry a node, the root counted",
        )
    tested.expect(
        bool(((tree.tokens >= 0) & (tree.tokens < vocabulary)).all()),
        "TokenTree.tokens",
        expected=f"tokens of the vocabulary, 0 to {vocabulary - 1}",
        found=tree.tokens.tolist(),
        fix="leave out what is no token",
    )


def check_nodes(
    tested: ComponentUnderTest,
    done: DraftRound,
    tree: TokenTree,
    source: ReferenceLogits,
    suffix: int | None = None,
) -> None:
    """Check root, proposal and log-probabilities against the drafter's logits.

    Args:
        tested: the tree builder.
        done: the round.
        tree: of the round.
        source: the drafter.
        suffix: the builder's ``shared_suffix``.
    """
    sampling = done.context.sampling
    tested.expect(
        int(tree.tokens[0]) == int(done.context.root),
        "the root",
        expected=f"the newest token, {int(done.context.root)}",
        found=int(tree.tokens[0]),
        fix="node 0 is context.root",
    )
    allowed = ("deterministic",) if sampling.greedy else ("deterministic", "sampled")
    tested.expect(
        tree.proposal in allowed,
        f"TokenTree.proposal at temperature {sampling.temperature:g}",
        expected=" or ".join(allowed),
        found=tree.proposal,
        fix="greedy rounds choose their candidates",
    )
    for node, path in enumerate(_paths(tree)):
        if node and source.has_paths:
            _check_found(tested, source, path)
        elif node:
            _check_node(tested, done, tree, source, node, path, suffix)


def _check_found(tested: ComponentUnderTest, source: ReferenceLogits, path: Tokens) -> None:
    paths = source.paths() or []
    tested.expect(
        any(tuple(found[: len(path)]) == path for found in paths),
        f"the node at {path}, below the root",
        expected=f"the beginning of a path that the drafter has found: {paths}",
        found="none of them",
        fix="join paths where they begin alike, and nowhere else",
    )


def _check_node(
    tested: ComponentUnderTest,
    done: DraftRound,
    tree: TokenTree,
    source: ReferenceLogits,
    node: int,
    path: Tokens,
    suffix: int | None,
) -> None:
    number, row = divmod(len(path) - 1, source.block)
    above = path[: number * source.block]
    origins = _origins(done, number, above, suffix)
    alike = f", or at one that ends with its newest {suffix} tokens" if suffix else ""
    tested.expect(
        bool(origins),
        f"the node at {path}, below the root",
        expected=f"a block that was expanded at {above} in pass {number + 1}{alike}",
        found=done.expanded[number] if number < len(done.expanded) else "no such pass",
        fix="a node comes from the rows of the block above it, which must have been expanded, or, "
        "with a shared_suffix, from those of a block that ends alike",
    )
    blocks = [(at, source.logits(at)) for at in origins]
    proposing = [
        (at, logits[row])
        for at, logits in blocks
        if row < len(logits) and bool(logits[row, path[-1]].isfinite())
    ]
    tested.expect(
        bool(proposing),
        f"the node at {path}",
        expected="a token that the drafter proposes",
        found="one whose logit is -inf, or of a row that is not there",
        fix="leave out tokens that are marked so, and all that would hang below them",
    )
    if tree.proposal == "sampled":
        expected = [float(_check_q(tested, tree, node)[path[-1]].log())]
    else:
        expected = [float(logits.log_softmax(-1)[path[-1]]) for _, logits in proposing]
    found = float(tree.log_q[node])
    tested.expect(
        any(abs(found - each) < 1e-3 for each in expected),
        f"TokenTree.log_q of the node at {path}",
        expected=" or ".join(f"{each:.4f}" for each in expected)
        + f", from row {row} of the block at {' or '.join(str(at) for at, _ in proposing)}",
        found=f"{found:.4f}",
        fix="a node at depth L belongs to row (L - 1) mod k of its block",
    )


def _origins(done: DraftRound, number: int, above: Tokens, suffix: int | None) -> list[Tokens]:
    """Return the expanded blocks that the nodes below a place may be of.

    That is the block at the place itself; where there is none, and the builder has a
    ``shared_suffix``, those at which so many of the newest tokens are the same.
    """
    if number < len(done.expanded) and above in done.expanded[number]:
        return [above]
    if suffix is None:
        return []
    root = int(done.context.root)
    newest = (root, *above)[-suffix:]
    every = [at for expanded in done.expanded for at in expanded]
    return [at for at in every if len(newest) == suffix and (root, *at)[-suffix:] == newest]


def _check_q(tested: ComponentUnderTest, tree: TokenTree, node: int) -> Tensor:
    """Check and return the distribution ``[V]`` that a node was drawn from."""
    tested.expect(
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
    tested.expect(
        0 <= row < tree.q.shape[0] and bool((siblings == row).all()),
        f"TokenTree.q_row of node {node} and its siblings",
        expected="one row of q for all of them",
        found=siblings.tolist(),
        fix="siblings are drawn from one distribution without replacement",
    )
    q = tree.q[row]
    tested.expect(
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
