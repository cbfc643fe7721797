"""Drafters and targets without a model, and how well samples fit an exact distribution.

Shapes: F frontier blocks, k block, N tree nodes, S samples, d tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import (
    Acceptance,
    Drafter,
    DraftOutput,
    DraftVocabulary,
    Frontier,
    Observation,
    RoundContext,
)
from falcon_lab.sampling import Sampling
from falcon_lab.testing.tested import ComponentUnderTest
from falcon_lab.tree import TokenTree

Tokens = tuple[int, ...]
"""The draft tokens from the root to a node."""


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Logits that follow from the node at which a block is expanded.

    Attributes:
        vocabulary: V.
        block: k.
        seed: of the logits.
        unproposed: share of the tokens that are not proposed.
        rows: tokens of a block that have logits, at most k.
        has_paths: there are whole paths too (``DraftOutput.paths``).
        words: a draft vocabulary, to whose columns a pass's logits are cut; None: all tokens.
    """

    vocabulary: int
    block: int
    seed: int = 0
    unproposed: float = 0.0
    rows: int | None = None
    has_paths: bool = False
    words: DraftVocabulary | None = None

    def paths(self) -> list[list[int]] | None:
        """Make whole paths below the root, some of which begin alike."""
        if not self.has_paths:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        count = int(torch.randint(0, 6, (1,), generator=generator))
        tokens = torch.randint(0, self.vocabulary, (count, 7), generator=generator)
        tokens[:, 0] %= 3
        return [row[: 1 + number].tolist() for number, row in enumerate(tokens, start=1)]

    def output(self, nodes: Sequence[Tokens]) -> DraftOutput:
        """Make the output of a pass over blocks at these nodes."""
        logits, words = torch.stack([self.logits(at) for at in nodes]), self.words
        if words is not None:
            logits = logits[..., words.ids]
        return DraftOutput(logits, paths=self.paths(), vocabulary=words)

    def logits(self, node: Tokens) -> Tensor:
        """Return the logits ``[rows, V]`` of the block at a node."""
        place = 0
        for token in node:
            place = place * (self.vocabulary + 1) + token + 1
        generator = torch.Generator().manual_seed(10_007 * self.seed + place)
        rows = self.block if self.rows is None else self.rows
        logits = 2 * torch.randn(rows, self.vocabulary, generator=generator)
        hidden = torch.rand(rows, self.vocabulary, generator=generator) < self.unproposed
        if self.words is not None:
            hidden |= self.words.columns(torch.arange(self.vocabulary)) < 0
        return logits.masked_fill(hidden, -torch.inf)


@dataclass(slots=True)
class DraftRound:
    """A round of drafting.

    Attributes:
        context: that it began with.
        expanded: for every pass, the nodes whose blocks it expanded.
        tree: the tree; None when a frontier was wrong.
        problem: what was wrong with a frontier; empty when nothing was.
    """

    context: RoundContext
    expanded: list[list[Tokens]] = field(default_factory=list)
    tree: TokenTree | None = None
    problem: str = ""


def grow(
    builder: Any, source: ReferenceLogits, context: RoundContext, passes: int = 99
) -> DraftRound:
    """Run a round of a tree builder, ended after so many passes as a controller ends it."""
    done = DraftRound(context)
    frontier = builder.start(context)
    while frontier is not None and len(done.expanded) < passes:
        done.problem = _problem(frontier, done.expanded, source.block)
        if done.problem:
            return done
        nodes = _nodes(frontier, done.expanded)
        done.expanded.append(nodes)
        frontier = builder.grow(source.output(nodes))
    done.tree = builder.finish()
    return done


def grow_parts(
    builder: Any, sources: Sequence[ReferenceLogits], context: RoundContext, passes: int = 99
) -> tuple[TokenTree, int, str]:
    """Run a round of a tree builder for several drafters, each of which has logits of its own.

    Returns:
        The tree, the passes that were made, and what was wrong with a frontier (or nothing).
    """
    expanded: list[list[list[Tokens]]] = [[] for _ in sources]
    frontier, made = builder.start(context), 0
    while frontier is not None and made < passes:
        outputs: list[DraftOutput | None] = []
        for source, before, own in zip(sources, expanded, frontier.parts, strict=True):
            if own is None:
                outputs.append(None)
                continue
            if problem := _problem(own, before, source.block):
                return builder.finish(), made, problem
            before.append(_nodes(own, before))
            outputs.append(source.output(before[-1]))
        first = next(output for output in outputs if output is not None)
        frontier, made = builder.grow(replace(first, parts=tuple(outputs))), made + 1
    return builder.finish(), made, ""


def _problem(frontier: Frontier, expanded: list[list[Tokens]], block: int) -> str:
    """Return what is wrong with a frontier, or nothing."""
    tokens, parents = list(frontier.tokens.shape), frontier.parents.tolist()
    if not expanded:
        right = tokens == [1, 0] and parents == [-1]
        return "" if right else f"first tokens {tokens} and parents {parents}, not [1, 0] and [-1]"
    if not parents:
        return f"no blocks in pass {len(expanded) + 1}, not None"
    if tokens != [len(parents), block]:
        return f"tokens {tokens} in pass {len(expanded) + 1}, not [F, k] = {[len(parents), block]}"
    if not all(0 <= parent < len(expanded[-1]) for parent in parents):
        blocks = len(expanded[-1])
        return f"parents {parents} in pass {len(expanded) + 1}, after a pass of {blocks} blocks"
    return ""


def _nodes(frontier: Frontier, expanded: list[list[Tokens]]) -> list[Tokens]:
    if not expanded:
        return [()]
    pairs = zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)
    return [(*expanded[-1][parent], *tokens) for tokens, parent in pairs]


class ReferenceDrafter(Drafter):
    """A drafter whose logits follow from the number of its passes.

    Args:
        vocabulary: V.
        block: k.
        has_paths: there are whole paths too.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, vocabulary: int, block: int, *, has_paths: bool = False) -> None:
        self.block = block
        self._has_paths = has_paths
        self._vocabulary = vocabulary
        self._passes = 0

    def reset(self, first: Tensor) -> None:
        """Count passes from 0."""
        self._passes = 0

    def observe(self, observation: Observation) -> None:
        """Ignore it."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Draft ``[F, k, V]`` random logits; a third of the tokens is not proposed."""
        self._passes += 1
        source = ReferenceLogits(
            self._vocabulary, self.block, self._passes, unproposed=0.3, has_paths=self._has_paths
        )
        return source.output([(number,) for number in range(frontier.tokens.shape[0])])


class TokenTable:
    """A target whose next token depends on the last one alone.

    Args:
        vocabulary: V.
        generator: of the table.
    """

    def __init__(self, vocabulary: int, generator: torch.Generator) -> None:
        self.table = 1.5 * torch.randn(vocabulary, vocabulary, generator=generator)

    def logits(self, tree: TokenTree) -> Tensor:
        """Return the logits ``[N, V]`` after every node."""
        return self.table[tree.tokens]

    def exact(self, root: int, sampling: Sampling) -> Tensor:
        """Return the distribution ``[V, V]`` of the two tokens after the root."""
        p = sampling.probabilities(self.table.double()).double()
        return p[root][:, None] * p

    def text(
        self, tree: TokenTree, found: Acceptance, sampling: Sampling, generator: torch.Generator
    ) -> list[int]:
        """Return the two tokens after the root, of a round and, if need be, drawn after it."""
        tokens = [*tree.tokens[found.path[1:]].tolist(), int(found.next_token)]
        if len(tokens) < 2:
            tokens.append(int(sampling.draw(self.table[tokens[-1]], generator)))
        return tokens[:2]


def expect_distribution(
    tested: ComponentUnderTest, what: str, texts: Tensor, exact: Tensor, fix: str
) -> None:
    """Raise unless ``[S, d]`` tokens follow the exact distribution ``[V] * d``."""
    chance = chi_square(texts, exact)
    found = torch.zeros_like(exact)
    found.index_put_(tuple(texts.T), torch.ones(len(texts)).to(exact), accumulate=True)
    distance = float((found / len(texts) - exact).abs().sum() / 2)
    tested.expect(
        chance > UNLIKELY,
        f"the distribution of {what}",
        expected="the target's own",
        found=f"a total variation of {distance:.3f} over {len(texts)} samples, which chance has "
        f"with a probability of {chance:.1g}",
        fix=fix,
    )


UNLIKELY = 1e-5
"""A fit that is worse than this by chance is taken for a fault."""


OFTEN = 5
"""Outcomes of a cell that are expected at least, for it to count alone."""


def common(exact: Tensor, samples: int) -> Tensor:
    """Return which cells of ``[V] * d`` count alone, of so many samples."""
    return exact.double() / exact.double().sum() * samples >= OFTEN


def chi_square(outcomes: Tensor, exact: Tensor) -> float:
    """Return the p-value of ``[S, d]`` tokens against their exact distribution, ``[V] * d``.

    Cells with fewer than ``OFTEN`` expected outcomes are merged; an impossible outcome gives 0.
    """
    vocabulary, places = exact.shape[0], exact.dim()
    weights = torch.tensor([vocabulary ** (places - 1 - place) for place in range(places)])
    found = torch.bincount((outcomes * weights).sum(-1), minlength=exact.numel()).double()
    expected = exact.flatten().double()
    expected = expected / expected.sum() * outcomes.shape[0]
    if bool(found[expected == 0].any()):
        return 0.0
    rare = ~common(exact, len(outcomes)).flatten()
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    found, expected = found[expected > 0], expected[expected > 0]
    statistic = ((found - expected).square() / expected).sum()
    freedom = max(1, len(expected) - 1)
    # The chi-square distribution's upper tail is a regularised incomplete gamma function.
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))
