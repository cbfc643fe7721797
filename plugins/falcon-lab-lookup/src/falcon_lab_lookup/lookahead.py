"""Lookahead decoding (arXiv 2402.02057): the target's own Jacobi iterations give the n-grams.

Shapes: C nodes of a round's tree, P auxiliary nodes, k tokens of an n-gram behind its first, V
vocabulary.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from falcon_lab.interfaces import (
    Acceptance,
    BuildContext,
    Drafter,
    DraftOutput,
    Frontier,
    Observation,
)
from falcon_lab.tree import AuxiliaryNodes, TokenTree
from falcon_lab_lookup import LookaheadConfig
from falcon_lab_lookup.pool import Pool
from falcon_lab_lookup.window import Shape, Window, most_tokens


class LookaheadDrafter(Drafter):
    """Draft n-grams that the target itself has predicted in passes that it made anyway.

    In one pass the target verifies the n-grams which begin with the newest token, and reads a
    window of guesses of the text to come (``window.py``) as auxiliary nodes, which gives new
    n-grams for the pool. There is no draft model; the cost is the width of the target's pass.

    Args:
        config: the options.
        context: gives the target's vocabulary.

    Attributes:
        block: N - 1, an n-gram without its first token.
        max_auxiliary: tokens of the window.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, config: LookaheadConfig, context: BuildContext) -> None:
        self.block = config.ngram - 1
        self.max_auxiliary = most_tokens(config.ngram, config.window)
        self.config = config
        self._vocabulary = context.host.vocab_size
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._begin()

    def _begin(self) -> None:
        self.pool = Pool(self.config.guesses)
        self.window: Window | None = None
        self._text: list[int] = []
        self._random = Random(self.config.seed)

    def reset(self, first: Tensor) -> None:
        """Forget the text, its n-grams and its window, and start one with ``first``."""
        self._begin()
        self._append(int(first))

    def observe(self, observation: Observation) -> None:
        """Read the tokens that the target has committed."""
        for token in observation.tokens.tolist():
            self._append(token)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return the n-grams that begin with the newest token, newest first, as ``paths``.

        The logits ``[1, k, V]`` are the newest one alone, for trees that are made of logits.
        Nothing is drafted below the root's block.
        """
        blocks, device = frontier.tokens.shape[0], frontier.tokens.device
        grams = self.pool.behind(self._text[-1]) if int(frontier.parents[0]) < 0 else []
        newest = grams[0] if grams else ()
        logits = torch.full((blocks, len(newest), self._vocabulary), -torch.inf, device=device)
        if newest:
            logits[0, torch.arange(self.block), torch.tensor(newest)] = 0.0
        return DraftOutput(logits, paths=grams)

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        """Return the window; none in the last rounds of a text, which ends before it."""
        config, device = self.config, tree.tokens.device
        if self.window is None:
            count = config.window + config.ngram - 3
            guess = self._random.choices(self._text, k=count)
            self.window = Window(config.ngram, config.window, guess)
        shape = self._shape(self.window.counts, device)
        if shape.deepest > max_depth:
            return None
        of_tree = shape.mask.new_zeros(shape.mask.shape[0], tree.drafted + 1)
        of_tree[:, 0] = True  # the root alone
        tokens = torch.tensor(self.window.tokens, device=device)
        return AuxiliaryNodes(tokens, shape.depth, torch.cat((of_tree, shape.mask), 1))

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        """Put the n-grams of the window's columns into the pool, and move it on."""
        assert self.window is not None
        new = logits[-self.window.counts[-1] :].argmax(-1).tolist()
        for first, gram in self.window.advance(self._text[-1], new):
            self.pool.add(first, gram)

    def _shape(self, counts: tuple[int, ...], device: torch.device) -> Shape:
        shape = self._shapes.get(counts)
        if shape is None:
            made = Shape.of(counts)
            shape = Shape(made.depth.to(device), made.mask.to(device), made.deepest)
            self._shapes[counts] = shape
        return shape

    def _append(self, token: int) -> None:
        self._text.append(token)
        if self.config.from_text and len(self._text) > self.block:
            first, *gram = self._text[-self.block - 1 :]
            self.pool.add(first, gram)
