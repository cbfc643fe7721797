"""ADED (arXiv 2407.12021): a tri-gram table that adapts to the text, searched for what comes next.

Shapes: n tokens of a path, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, Drafter, DraftOutput, Frontier, Observation
from falcon_lab_aded import AdedConfig
from falcon_lab_aded.search import TreeSearch
from falcon_lab_aded.successors import Adaptive, Known, nothing
from falcon_lab_aded.table import TrigramTable


class AdedDrafter(Drafter):
    """Draft the nodes that a search of the tri-grams behind the newest two tokens visits most.

    The tree builder ``paths`` joins them; they are chosen, so that above temperature 0 the target
    draws a token at every node and goes on where it hits one, by its own temperature, top-k and
    top-p. The search is seeded by the seed and the length of the text.

    Args:
        config: the options.
        context: gives the target's vocabulary.

    Raises:
        FalconLabError: the table cannot be read, or is one of another tokenizer.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, config: AdedConfig, context: BuildContext) -> None:
        self.block = config.depth
        self.config = config
        self._vocabulary = context.host.vocab_size
        self._table: Known = nothing
        if config.table is not None:
            self._table = table = TrigramTable.open(Path(config.table))
            table.check_tokenizer(context.host.tokenizer, self._vocabulary)
        self._begin()

    def _begin(self) -> None:
        config = self.config
        self._adaptive = Adaptive(
            self._table,
            self._vocabulary,
            update=config.update,
            cap=config.cap,
            window=config.window,
        )

    def reset(self, first: Tensor) -> None:
        """Forget the text and what it has changed, and start one with ``first``."""
        self._begin()
        self._adaptive.extend([int(first)])

    def observe(self, observation: Observation) -> None:
        """Learn from the tokens that the target has committed."""
        self._adaptive.extend(observation.tokens.tolist())

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return the nodes as ``paths`` from the root, those with the most visits first.

        The logits ``[1, n, V]`` are the most visited path alone, for trees that are made of logits.
        Nothing is drafted below the root's block.
        """
        blocks, device = frontier.tokens.shape[0], frontier.tokens.device
        paths = self.paths() if int(frontier.parents[0]) < 0 else []
        # The first child of each node in the order of visits has the most of them.
        longest: list[int] = []
        for path in paths:
            if path[:-1] == longest:
                longest = path
        logits = torch.full((blocks, len(longest), self._vocabulary), -torch.inf, device=device)
        if longest:
            logits[0, torch.arange(len(longest)), torch.tensor(longest)] = 0.0
        return DraftOutput(logits, paths=paths)

    def paths(self) -> list[list[int]]:
        """Search behind the newest two tokens; return the way to every node that is drafted."""
        config, text = self.config, self._adaptive.text
        if len(text) < 2:
            return []
        search = TreeSearch(
            cache(self._adaptive.successors),
            self._vocabulary,
            *text[-2:],
            depth=config.depth,
            c1=config.c1,
            c2=config.c2,
            random=Random(config.seed + len(text)),
        )
        search.run(config.iterations)
        return [search.path(node) for node in search.best(config.nodes)]
