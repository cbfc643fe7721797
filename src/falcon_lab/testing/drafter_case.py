"""A drafter under test, and a sequence that it drafts for without a target in the loop.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from falcon_lab.decoding.drafting import with_auxiliary
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.target_sequences import OneSequence
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
from falcon_lab.tree import listed_tree

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


class TextLayers:
    """The target's layers over the KV cache of a text, of which more is committed step by step.

    Args:
        text: the sequence.
    """

    def __init__(self, text: Text) -> None:
        self._target, self._tokens = text.target, text.tokens
        self._room = len(text.tokens) + PROVISIONAL
        self._sequences: OneSequence | None = None
        self._known = 0

    def commit(self, known: int) -> None:
        """Drop what is provisional; the first ``known`` tokens are committed."""
        self._sequences, self._known = None, known

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens."""
        if self._sequences is None:  # few drafters ask for it
            self._sequences = OneSequence(self._target, 1, self._room)
            cache = self._sequences.open(0)
            self._target.prefill(self._tokens[: self._known], cache)
            self._sequences.fill(0, cache)
        return self._sequences.run(drafts, plan)


class DraftedSequence:
    """One sequence that a drafter drafts for.

    Args:
        drafter: observes it.
        text: the sequence.
    """

    def __init__(self, drafter: Any, text: Text) -> None:
        self.drafter, self.text = drafter, text
        self.known = 0
        self._layers = TextLayers(text)
        drafter.attach(self._layers)
        drafter.reset(text.tokens[0].clone())

    def observe(self, rows: int, *, remaining: int = 0) -> None:
        """Commit the next positions of the text."""
        start, self.known = self.known, self.known + rows
        self._layers.commit(self.known)
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
