"""Causal-consistency path search (DiffuSpec, arXiv 2510.02358): a path that reads well.

A diffusion model predicts the places of a block apart from each other. The search follows paths
from left to right through their likeliest tokens, by how likely the drafter finds each token at its
place and an n-gram model each token behind the two before it.

Shapes: n places, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext, TreeBuilder
from falcon_lab.tree import TokenTree, listed_tree
from falcon_lab_diffusion import CpsConfig


class NGrams(Protocol):
    """What knows how likely a token is behind others: ``Trigrams``."""

    def log_probability(self, before: Sequence[int], token: int) -> float:
        """Return the natural logarithm of a token's probability behind the newest two."""
        ...


class Candidate(NamedTuple):
    """A token that may stand at a place, with its log-probability."""

    token: int
    log_q: float


class FoundPath(NamedTuple):
    """A path through the places.

    Attributes:
        score: of the search; the greater the better.
        tokens: of the path.
        log_q: of each.
        ended: whether its last token ends the text.
    """

    score: float
    tokens: tuple[int, ...]
    log_q: tuple[float, ...]
    ended: bool


Lattice = Sequence[Sequence[Candidate]]


def search(
    lattice: Lattice,
    before: Sequence[int],
    *,
    beam: int,
    weight: float,
    ngrams: NGrams | None,
    ends: Collection[int] = (),
) -> list[FoundPath]:
    """Return the best paths, the best first.

    Behind a token that ends the text nothing but that token is written, so such a path goes on by
    the drafter's log-probability of it, and not at all where that is not known.

    Args:
        lattice: the candidates of every place.
        before: the newest committed tokens.
        beam: paths that are followed.
        weight: lambda, of the drafter's log-probability.
        ngrams: the rest of the score; None: nothing, and lambda is 1.
        ends: tokens that end the text.
    """
    if ngrams is None:
        weight = 1.0
    paths = [FoundPath(0.0, (), (), ended=False)]
    for candidates in lattice:
        grown: list[FoundPath] = []
        for path in paths:
            if path.ended:
                grown.append(_continued(path, candidates, weight))
                continue
            written = (*before, *path.tokens)
            for token, log_q in candidates:
                score = path.score + weight * log_q
                if ngrams is not None and weight < 1:
                    score += (1 - weight) * ngrams.log_probability(written, token)
                added = (*path.tokens, token), (*path.log_q, log_q)
                grown.append(FoundPath(score, *added, token in ends))
        if not grown:
            break
        grown.sort(key=lambda path: path.score, reverse=True)
        paths = grown[:beam]
    return paths


def _continued(path: FoundPath, candidates: Sequence[Candidate], weight: float) -> FoundPath:
    """Return a path that has ended, with what its ending costs at one place more."""
    end = next((each.log_q for each in candidates if each.token == path.tokens[-1]), 0.0)
    return path._replace(score=path.score + weight * end)


class PathSearch(TreeBuilder):
    """Build the path that the search finds, or the best few as one tree, in one pass.

    Nodes are deterministic: a path that was searched for is no sample of the drafter's
    distributions, and at T > 0 a token is accepted with the target's own (one-hot) rule.

    Args:
        config: the search.
        context: gives the tokens that end a text, and the tokenizer for an ARPA file of texts.

    Raises:
        FalconLabError: the ARPA file cannot be read.
    """

    def __init__(self, config: CpsConfig, context: BuildContext) -> None:
        self._config = config
        self.max_depth = context.reach(config.depth)
        self.max_nodes = config.paths * self.max_depth + 1
        self._ends: Collection[int] = getattr(context.host, "eos_ids", frozenset())
        self._ngrams: NGrams | None = None
        if config.ngrams is not None:
            from falcon_lab_diffusion.trigrams import read_arpa

            tokenizer = getattr(context.host, "tokenizer", None)
            self._ngrams = read_arpa(Path(config.ngrams), tokenizer)

    def __deepcopy__(self, memo: dict[int, object]) -> PathSearch:
        """Copy what belongs to a sequence; the n-gram model is the same one."""
        other = object.__new__(PathSearch)
        other.__dict__.update(self.__dict__)
        return other

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._root, self._found = context.root, list[FoundPath]()
        self._depth, self._nodes = context.budget.limit(
            depth=self.max_depth, nodes=self.max_nodes - 1, block=self.max_depth
        )
        if context.budget.passes == 0 or self._depth < 1 or self._nodes < 1:
            self._depth = 0
            return None
        self._before: Sequence[int] = ()
        if self._ngrams is not None:
            self._before = context.text(2) or [int(context.root)]
        return Frontier.root(context.root.device)

    def grow(self, output: DraftOutput) -> None:
        """Search in the distributions of the block."""
        self._found = search(
            self._lattice(output),
            self._before,
            beam=self._config.beam,
            weight=self._config.weight,
            ngrams=self._ngrams,
            ends=self._ends,
        )[: self._config.paths]

    def _lattice(self, output: DraftOutput) -> Lattice:
        """Return the candidates of every place, up to the depth of the round."""
        log_q = output.log_probabilities[0, : self._depth]
        if not log_q.numel():
            return []
        values, columns = log_q.topk(min(self._config.candidates, log_q.shape[-1]))
        listed = values.tolist(), output.target_tokens(columns).tolist()
        ends = self._end_columns(output, log_q)
        lattice = []
        for place, (likely, tokens) in enumerate(zip(*listed, strict=True)):
            chosen = _up_to(self._config.mass, [*map(Candidate, tokens, likely)])
            if not chosen:  # nothing is proposed here, nor behind
                break
            known = {each.token for each in chosen}
            extra = [Candidate(t, v[place]) for t, v in ends.items() if t not in known]
            lattice.append([*chosen, *(each for each in extra if math.isfinite(each.log_q))])
        return lattice

    def _end_columns(self, output: DraftOutput, log_q: Tensor) -> dict[int, list[float]]:
        """Return the log-probabilities, place by place, of tokens that end the text."""
        if not self._ends:
            return {}
        tokens = torch.tensor(sorted(self._ends), device=log_q.device)
        words = output.vocabulary
        columns = tokens if words is None else words.columns(tokens)
        there = (columns >= 0) & (columns < log_q.shape[-1])
        found = log_q[:, columns[there]].T.tolist()
        return dict(zip(tokens[there].tolist(), found, strict=True))

    def finish(self) -> TokenTree:
        """Return the paths, those with a common beginning joined."""
        tokens: list[int] = []
        parents: list[int] = []
        log_q: list[float] = []
        known: dict[tuple[int, ...], int] = {(): 0}
        for path in self._found:
            for length in range(1, len(path.tokens) + 1):
                prefix = path.tokens[:length]
                if prefix in known:
                    continue
                if len(tokens) == self._nodes:
                    break
                tokens.append(prefix[-1])
                parents.append(known[prefix[:-1]])
                log_q.append(path.log_q[length - 1])
                known[prefix] = len(tokens)
        return listed_tree(self._root, tokens, parents, log_q)


def _up_to(mass: float, ordered: Sequence[Candidate]) -> list[Candidate]:
    """Return the fewest of the most likely candidates that have so much mass, or all."""
    chosen: list[Candidate] = []
    total = 0.0
    for each in ordered:
        if not math.isfinite(each.log_q) or total >= mass:
            break
        chosen.append(each)
        total += math.exp(each.log_q)
    return chosen
