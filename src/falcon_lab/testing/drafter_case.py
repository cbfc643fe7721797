"""A drafter under test, and a sequence that it drafts for without a target in the loop.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from falcon_lab.decoding.continuing import ContinuedPasses
from falcon_lab.decoding.drafting import with_auxiliary
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.target_sequences import OneSequence, TreePasses
from falcon_lab.interfaces import (
    Acceptance,
    BuildContext,
    Drafter,
    DraftOutput,
    DraftTokens,
    DraftVocabulary,
    Frontier,
    LayerPlan,
)
from falcon_lab.model.target import Target
from falcon_lab.sampling import drawn
from falcon_lab.testing.decoding import engine, stirred
from falcon_lab.testing.targets import Text, random_tokens
from falcon_lab.testing.tested import ComponentUnderTest
from falcon_lab.tree import TokenTree, listed_tree

TOLERANCE = 1e-4
"""Largest difference of two computations of the same, in the unit of the largest value."""

PROVISIONAL = 64
"""Most draft tokens of a round that a drafter has the target read."""

STIRRED = 0.2
"""Noise that is added to all weights, so that no bias is zero and no two norms are equal."""


CHAIN = {"name": "chain"}


def union_of(tree: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """Return the node of the tree of a union, all of whose parts have the same tree."""
    return {"name": "union", "parts": [dict(tree) for _ in range(parts)], "nodes": 12}


class Case:
    """A drafter under test and its tiny target.

    Args:
        tested: the drafter.
        target: what it drafts for.
    """

    def __init__(self, tested: ComponentUnderTest, target: Target) -> None:
        self.tested, self.target = tested, target
        self.context = BuildContext(target, token_counts=self._token_counts)

    def _token_counts(self) -> Tensor:
        """Return ``[V]``: any tokens are the most frequent ones, so that columns are no tokens."""
        return torch.randperm(self.target.vocab_size, generator=self.tested.generator(6))

    @cached_property
    def vocabulary(self) -> DraftVocabulary | None:
        """The drafter's draft vocabulary, if it has one."""
        found: DraftVocabulary | None = self.tested.build(self.context).vocabulary
        return found

    @property
    def width(self) -> int:
        """Return the tokens that the drafter has logits of."""
        return (self.vocabulary or self.target).vocab_size

    def over_target(self, logits: Tensor) -> Tensor:
        """Return logits of the drafter's columns over the target's vocabulary."""
        return logits if self.vocabulary is None else self.vocabulary.spread(logits, -torch.inf)

    def fresh(self) -> Any:
        """Build the drafter in evaluation mode, with the same weights every time."""
        return self.stirred(self.tested.build(self.context))

    def stirred(self, drafter: Any) -> Any:
        """Add noise to the drafter's weights, if it has any, and put it into evaluation mode."""
        return stirred(drafter, STIRRED, self.tested.generator(1))

    def engine(self, drafter: Drafter, **parts: Any) -> SpeculativeEngine:
        """Make an engine of the drafter, with ``parts`` as ``decoding.engine`` has them.

        A drafter that is made of others has such a tree for each of them.
        """
        if drafter.drafters:
            parts["tree"] = union_of(parts.get("tree", CHAIN), len(drafter.drafters))
        return engine(self.target, drafter, components=self.tested.components, **parts)

    def text(self, drafter: Drafter, rows: int, number: int = 2) -> Text:
        """Make a random text of so many positions and one token more."""
        tokens = random_tokens(self.target, rows + 1, self.tested.generator(number))
        return self.read(drafter, tokens)

    def read(self, drafter: Drafter, tokens: Tensor) -> Text:
        """Let the target read ``[n + 1]`` tokens."""
        return Text.read(self.target, drafter, tokens)

    def of(self, drafter: Drafter) -> BuildContext:
        """Make the context of components that work with the drafter."""
        return BuildContext.of(self.target, drafter)

    def same(self, what: str, ours: Tensor, expected: Tensor, fix: str) -> None:
        """Raise unless two computations gave the same logits."""
        self.tested.expect(
            ours.shape == expected.shape,
            f"the shape of {what}",
            expected=list(expected.shape),
            found=list(ours.shape),
            fix=fix,
        )
        apart = difference(ours, expected)
        self.tested.expect(
            apart <= TOLERANCE,
            what,
            expected=f"the same logits within {TOLERANCE:g}",
            found=f"a difference of {apart:.2g}",
            fix=fix,
        )


def difference(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in the unit of the largest expected value above 1."""
    if expected.numel() == 0:
        return 0.0
    if not torch.equal(ours.isfinite(), expected.isfinite()):
        return float("inf")
    ours, expected = (rows.detach().float().nan_to_num(neginf=0.0) for rows in (ours, expected))
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@dataclass(frozen=True, slots=True)
class Appended:
    """A pass through the target's layers that a drafter has made.

    Attributes:
        before: draft tokens that the round had appended before.
        drafts: what it appended.
        plan: the layers.
        newest: the newest committed token.
    """

    before: int
    drafts: DraftTokens
    plan: LayerPlan
    newest: int


class TextLayers:
    """The target's layers over the KV cache of a text, of which more is committed step by step.

    Attributes:
        appended: all passes through them, those of a verification among them.

    Args:
        text: the sequence.
        drafter: which is attached to them.
    """

    def __init__(self, text: Text, drafter: Drafter) -> None:
        self._target, self._tokens, self._drafter = text.target, text.tokens, drafter
        self._room = len(text.tokens) + PROVISIONAL
        self._passes: TreePasses | None = None
        self._known = 0
        self.appended: list[Appended] = []

    def commit(self, known: int) -> None:
        """Drop what is provisional; the first ``known`` tokens are committed."""
        self._passes, self._known = None, known

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens."""
        if self._passes is None:  # few drafters ask for it
            self._passes = self._begin()
        return self._passes.run(drafts, plan)

    def verify(self, tree: TokenTree) -> Tensor:
        """Return logits ``[N, V]`` of a tree, from where the drafter's passes have ended."""
        passes = self._passes or self._begin()
        return passes.verify([tree])[0].logits

    def _begin(self) -> TreePasses:
        sequences = WatchedSequence(self._target, self._room, self._tokens[self._known])
        cache = sequences.open(0)
        if self._known:
            self._target.prefill(self._tokens[: self._known], cache)
        sequences.fill(0, cache)
        sequences.appended = self.appended
        if not self._drafter.lower_layers:
            return sequences
        return ContinuedPasses(self._target, sequences, self._drafter)


class WatchedSequence(OneSequence):
    """A sequence that notes what is appended to it in a round.

    Args:
        target: the model.
        room: positions.
        newest: the newest committed token, 0-d long.
    """

    def __init__(self, target: Target, room: int, newest: Tensor) -> None:
        super().__init__(target, 1, room)
        self.appended: list[Appended] = []
        self._newest, self._count = int(newest), 0

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens."""
        self.appended.append(Appended(self._count, drafts[0], plan, self._newest))
        self._count += len(drafts[0].tokens)
        return super().run(drafts, plan)


class DraftedSequence:
    """One sequence that a drafter drafts for.

    Args:
        drafter: observes it.
        text: the sequence.

    Attributes:
        known: positions that are committed.
        layers: the target's, which the drafter is attached to.
    """

    def __init__(self, drafter: Any, text: Text) -> None:
        self.drafter, self.text = drafter, text
        self.known = 0
        self.layers = TextLayers(text, drafter)
        drafter.attach(self.layers)
        drafter.reset(text.tokens[0].clone())

    def observe(self, rows: int, *, remaining: int = 0) -> None:
        """Commit the next positions of the text."""
        start, self.known = self.known, self.known + rows
        self.layers.commit(self.known)
        self.drafter.observe(self.text.observation(self.drafter, start, self.known, remaining))

    def observe_round(self) -> None:
        """Commit the next position by a round of no draft tokens, with auxiliary nodes if any."""
        root, known, target = self.text.tokens[self.known], self.known, self.text.target
        alone = listed_tree(root, (), (), ())
        tree = with_auxiliary(self.drafter, alone, target.max_positions - known - 1)
        if tree.auxiliary:
            cache = target.new_cache(known + tree.nodes)
            target.prefill(self.text.tokens[:known], cache)
            accepted = Acceptance(torch.zeros_like(root)[None], self.text.tokens[known + 1])
            self.drafter.observe_auxiliary(tree, target.verify(tree, cache).logits, accepted)
        self.observe(1)

    def draft(self, frontier: Frontier | None = None) -> DraftOutput:
        """Draft a pass: the root's, unless blocks are given."""
        frontier = frontier or Frontier.root(self.text.tokens.device)
        output: DraftOutput = self.drafter.draft(frontier)
        return output

    def round(self, generator: torch.Generator, passes: int = 3) -> list[DraftOutput]:
        """Draft passes over blocks of proposed tokens, drawn at random."""
        outputs = [self.draft()]
        most = self.drafter.max_passes or passes
        while len(outputs) < min(passes, most):
            frontier = expanded(outputs[-1], self.drafter.block, generator)
            if frontier is None:
                break
            outputs.append(self.draft(frontier))
        return outputs


def expanded(output: DraftOutput, block: int, generator: torch.Generator) -> Frontier | None:
    """Draw up to three different blocks below a pass; None where the drafter ends before.

    Their parents are in no order, as in a tree whose best branches come first, and some of a
    pass's blocks have no child.
    """
    logits = output.logits
    proposed = logits.isfinite()
    whole = proposed.any(-1).all(-1).nonzero().flatten().tolist()  # [F]
    if logits.shape[1] < block or not whole:
        return None
    blocks = []
    for parent in (whole[-1], whole[0], whole[0]):
        path = drawn(proposed[parent].float(), generator)
        blocks.append((parent, *output.target_tokens(path).tolist()))
    chosen = torch.tensor(list(dict.fromkeys(blocks)))
    return Frontier(chosen[:, 1:].contiguous(), chosen[:, 0].contiguous())
