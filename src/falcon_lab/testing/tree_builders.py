"""What a tree builder promises.

Shapes: N tree nodes, R rows of draft distributions, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from falcon_lab.acceptance import SamplingRule
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, BuildContext, RoundContext
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.testing.decoding import engine
from falcon_lab.testing.outcomes import TokenTable, expect_distribution
from falcon_lab.testing.speculating import expect_greedy, expect_whole
from falcon_lab.testing.standing import Grown, Standing, Wandering, grow
from falcon_lab.testing.subject import Recipe, Subject
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.token_trees import check_nodes, check_tree
from falcon_lab.tree import TokenTree

VOCABULARY = 12
ROOT = 7
ROUNDS = 800
"""Sampled rounds of the statistical test."""

SOURCES: tuple[dict[str, Any], ...] = ({}, {"silent": 0.6}, {"silent": 1.0}, {"rows": 0})
"""Drafters that say everything, something, nothing, or have no rows at all."""


def check_tree_builder(
    builder: Recipe, *, blocks: Sequence[int] = (1, 2, 3), seed: int = 0
) -> None:
    """See that a tree builder keeps its promises, with drafters of several block sizes.

    - Its frontiers are what ``Frontier`` says, and its trees what ``TokenTree`` says: the root
      first, parents before children, no token twice among siblings, nothing that the drafter does
      not propose, and every node's ``log_q`` from the row that it belongs to.
    - A budget is kept, whatever of depth, nodes and passes it limits; ``max_depth`` and
      ``max_nodes`` are never exceeded, nor what the drafter reaches (``BuildContext.max_passes``).
    - A round may be broken off after any pass, and the next one knows nothing of it.
    - Sampled trees carry the distributions that their nodes were drawn from, and these are true:
      with rejection sampling the output follows the target. The generator alone draws.
    - Greedy text with it is the target's own.

    Args:
        builder: a YAML node, or what makes a tree builder from a ``BuildContext``.
        blocks: k of the drafters that it is for.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    subject = Subject("tree_builder", builder, seed)
    target = tiny_target(vocab=VOCABULARY, positions=48)
    for block in blocks:
        finds = takes_paths(subject, target, block)
        with subject.step(f"its trees for blocks of {block}"):
            check_limits(subject, target, block, finds=finds)
            check_rounds(subject, target, block, finds=finds)
        with subject.step(f"sampled trees for blocks of {block}"):
            if not finds:  # whoever finds paths draws nothing
                check_sampled(subject, target, block)
        with subject.step(f"decoding with blocks of {block}"):
            check_decoding(subject, target, block, finds=finds)


def check_limits(subject: Subject, target: Target, block: int, *, finds: bool = False) -> None:
    """``max_depth``, ``max_nodes`` and what a drafter reaches."""
    for passes in (None, 1, 2):
        made = subject.build(BuildContext(target, block, passes))
        limits = made.max_depth, made.max_nodes
        subject.expect(
            all(isinstance(each, int) for each in limits) and limits[0] >= 0 and limits[1] >= 1,
            "max_depth and max_nodes",
            expected="whole numbers, at least 0 and 1 (the root)",
            found=limits,
            fix="set both in __init__",
        )
        most = None if passes is None or finds else passes * block
        subject.expect(
            most is None or made.max_depth <= most,
            f"max_depth for a drafter of {passes} passes of {block} tokens",
            expected=f"at most {most}",
            found=made.max_depth,
            fix="cut the depth by context.reach(depth)",
        )


def takes_paths(subject: Subject, target: Target, block: int) -> bool:
    """Whether it makes its trees of whole paths: without them it refuses a pass, and says so."""
    made = subject.build(BuildContext(target, block))
    context = RoundContext(torch.tensor(ROOT), Budget(), Sampling(), subject.generator())
    try:
        grow(made, Standing(VOCABULARY, block, subject.seed), context)
    except FalconLabError:
        return True
    return False


def check_rounds(subject: Subject, target: Target, block: int, *, finds: bool = False) -> None:
    """Every tree of rounds of all kinds."""
    made = subject.build(BuildContext(target, block))
    for number, (options, budget, temperature) in enumerate(_rounds(made, block)):
        source = Standing(VOCABULARY, block, subject.seed + number, finds=finds, **options)
        whole = _round(subject, made, source, budget, temperature, number)
        for passes in range(len(whole.asked) if number % 3 == 0 else 0):
            _round(subject, made, source, budget, temperature, number, passes + 1)
        again = _round(subject, made, source, budget, temperature, number)
        assert whole.tree is not None
        assert again.tree is not None
        subject.expect(
            torch.equal(again.tree.tokens, whole.tree.tokens)
            and torch.equal(again.tree.parents, whole.tree.parents),
            "a round made again with the same generator",
            expected=f"the same tree {whole.tree.tokens.tolist()}",
            found=again.tree.tokens.tolist(),
            fix="begin every round anew in start(), and draw from context.generator alone",
        )


def _rounds(made: Any, block: int) -> Iterator[tuple[dict[str, Any], Budget, float]]:
    depths = (None, 0, 1, block, block + 1, made.max_depth, made.max_depth + 3)
    nodes = (None, 0, 1, 2, made.max_nodes - 1, made.max_nodes + 5)
    passes = (None, 0, 1, 2)
    budgets = [Budget(depth=depth) for depth in depths]
    budgets += [Budget(nodes=node) for node in nodes] + [Budget(passes=each) for each in passes]
    budgets += [Budget(2, 3, 1), Budget(block + 1, 4, 2)]
    for options, temperature in product(SOURCES, (0.0, 1.0)):
        for budget in budgets if not options else budgets[:1] + budgets[-2:]:
            yield options, budget, temperature


def _round(
    subject: Subject,
    made: Any,
    source: Standing,
    budget: Budget,
    temperature: float,
    number: int,
    passes: int = 99,
) -> Grown:
    context = RoundContext(
        torch.tensor(ROOT), budget, Sampling(temperature), subject.generator(number)
    )
    done = grow(made, source, context, passes)
    subject.expect(
        not done.problem,
        "a frontier",
        expected="what interfaces.Frontier says",
        found=done.problem,
        fix="tokens are the k draft tokens from one block to the next, parents count the blocks "
        "of the pass before, and None ends the round",
    )
    assert done.tree is not None
    _check_budget(subject, made, done, done.tree, source)
    check_tree(subject, done.tree, VOCABULARY)
    check_nodes(subject, done, done.tree, source)
    return done


def _check_budget(
    subject: Subject, made: Any, done: Grown, tree: TokenTree, source: Standing
) -> None:
    budget, deepest = done.context.budget, int(tree.depth.max())
    limits = [
        ("tree.depth.max()", deepest, "max_depth", made.max_depth),
        ("tree.nodes", tree.nodes, "max_nodes", made.max_nodes),
        ("tree.depth.max()", deepest, "the budget's depth", budget.depth),
        ("tree.drafted", tree.drafted, "the budget's nodes", budget.nodes),
        ("the passes asked for", len(done.asked), "the budget's passes", budget.passes),
    ]
    if not source.finds:
        reach = len(done.asked) * source.block
        limits.append(("tree.depth.max()", deepest, "k a pass", reach))
    for what, found, limit, most in limits:
        subject.expect(
            most is None or found <= most,
            f"{what} in a round of {budget}",
            expected=f"at most {most}, {limit}",
            found=found,
            fix="cut the tree by context.budget.limit(depth=…, nodes=…, block=…)",
        )


def check_sampled(subject: Subject, target: Target, block: int) -> None:
    """The distributions that a sampled tree carries are those that it was drawn from."""
    made = subject.build(BuildContext(target, block))
    source = Standing(VOCABULARY, block, subject.seed)
    tokens = TokenTable(VOCABULARY, subject.generator(60))
    sampling, generator = Sampling(1.0, top_k=4), subject.generator(61)
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
        subject,
        "sampled output with its trees",
        torch.tensor(texts),
        tokens.exact(ROOT, sampling),
        "q must be the distribution that siblings were drawn from, in their order and without "
        "replacement; candidates that were chosen are deterministic",
    )


def check_decoding(subject: Subject, target: Target, block: int, *, finds: bool = False) -> None:
    """Greedy text with a drafter that is sometimes right."""
    drafter = Wandering(target.vocab_size, block, finds=finds)
    tree = subject.build(BuildContext.of(target, drafter))
    made = engine(target, drafter, tree=tree, components=subject.components)
    expect_greedy(subject, target, made, f"its trees and blocks of {block}")
    expect_whole(subject, target, made, f"its trees and blocks of {block}")
