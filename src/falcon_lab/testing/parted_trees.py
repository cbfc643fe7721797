"""The check of a tree builder for several drafters in one tree.

Shapes: N tree nodes, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from falcon_lab.acceptance import SamplingRule
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, BuildContext, RoundContext
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.testing.reference import (
    ReferenceLogits,
    TokenTable,
    expect_distribution,
    grow_parts,
)
from falcon_lab.testing.tested import ComponentUnderTest
from falcon_lab.tree import TokenTree

MOST_PARTS = 4
"""Drafters of a tree that are tried."""

ROUNDS = 300
"""Sampled rounds of the statistical test."""


def parts_of(tested: ComponentUnderTest, target: Target, block: int) -> BuildContext | None:
    """Return the context of as many drafters as a builder is for; None: it is for a single one.

    Raises:
        FalconLabError: it is for none that is tried.
    """
    refused: FalconLabError | None = None
    for count in range(MOST_PARTS + 1):
        own = BuildContext(target, block)
        context = BuildContext(target, block, parts=(own,) * count)
        try:
            tested.build(context)
        except FalconLabError as error:
            refused = refused or error
        else:
            return context if count else None
    assert refused is not None
    raise refused


def sources_of(context: BuildContext, vocabulary: int, seed: int) -> list[ReferenceLogits]:
    """Return what each of the drafters says; the first ones leave tokens out."""
    count = len(context.parts)
    return [
        ReferenceLogits(
            vocabulary, context.block, count * seed + part, unproposed=0.4 * (part + 1 < count)
        )
        for part in range(count)
    ]


def one_round(
    tested: ComponentUnderTest,
    context: BuildContext,
    sources: Sequence[ReferenceLogits],
    round_context: RoundContext,
    passes: int = 99,
) -> TokenTree:
    """Return a round's tree, whose size and frontiers are checked."""
    made, budget = tested.build(context), round_context.budget
    tree, asked, problem = grow_parts(made, sources, round_context, passes)
    tested.expect(
        not problem,
        "a frontier of one of its parts",
        expected="what interfaces.Frontier says",
        found=problem,
        fix="every part is asked for blocks of its own passes alone",
    )
    deepest = int(tree.depth.max())
    for what, found, limit, most in (
        ("tree.depth.max()", deepest, "max_depth", made.max_depth),
        ("tree.nodes", tree.nodes, "max_nodes", made.max_nodes),
        ("tree.depth.max()", deepest, "the budget's depth", budget.depth),
        ("tree.drafted", tree.drafted, "the budget's nodes", budget.nodes),
        ("the passes asked for", asked, "the budget's passes", budget.passes),
    ):
        tested.expect(
            most is None or found <= most,
            f"{what} in a round of {budget} with several drafters",
            expected=f"at most {most}, {limit}",
            found=found,
            fix="cut what the parts have grown to the nodes of the whole",
        )
    return tree


def check_sampled(
    tested: ComponentUnderTest, target: Target, context: BuildContext, root: int, vocabulary: int
) -> None:
    """Check that sampled output follows the target, whatever the drafters propose."""
    tokens = TokenTable(vocabulary, tested.generator(63))
    sampling, generator = Sampling(1.0, top_k=4), tested.generator(64)
    rule, sources = SamplingRule(None, BuildContext(target, 1)), sources_of(context, vocabulary, 5)
    made, texts = tested.build(context), list[list[int]]()
    for _ in range(ROUNDS):
        asked = RoundContext(torch.tensor(root), Budget(), sampling, generator)
        tree, _, _ = grow_parts(made, sources, asked)
        found = rule(tree, tokens.logits(tree), sampling, generator)
        texts.append(tokens.text(tree, found, sampling, generator))
    expect_distribution(
        tested,
        "sampled output with trees of several drafters",
        torch.tensor(texts),
        tokens.exact(root, sampling),
        "what two parts have drawn is the first one's, the second one's q is without it, and no "
        "drawn node is left out",
    )
