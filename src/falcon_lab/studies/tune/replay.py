"""Replay rounds on the target's text: which candidates would be accepted, and at what cost.

A traced round follows the target's text, pass by pass: each block is given the true tokens and the
drafter's own predicted features, as a tree's branches are. The ranks of the true tokens on the way
are all that a static tree's acceptance depends on: it accepts the longest prefix of them that it
contains. No wide tree need be verified, and no rank is missed. Ranks do not describe a tree whose
shape the drafter decides, so the limits of such a tree are chosen by replaying it whole. An
``Estimate`` is made of replayed rounds, priced by the costs.

Shapes: D depths, W ranks or width, n draft tokens of a tree, F frontier blocks, k block,
V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.interfaces import Drafter, Frontier
from falcon_lab.measure.statistics import Interval, paired_ratio
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.texts import Reader, Text, replay
from falcon_lab.trees.paths import Path


@dataclass(frozen=True)
class Odds:
    """Holds what rounds do under one rule of stopping.

    Attributes:
        gain: path -> share of the rounds that would accept it, were it in the tree.
        reach: entry d: share of the rounds that draft d tokens deep or deeper; d is 0 to D.
        passes: entry j: share of the rounds that make j passes or more; entry 0 is 1.
        asked: entry j: share of the rounds in which the controller decides after pass j.
    """

    gain: dict[Path, float]
    reach: list[float]
    passes: list[float]
    asked: list[float]


def odds(traces: Sequence[TracedRound], block: int, most: int, log_threshold: float) -> Odds:
    """Count all paths of ``most`` passes at the most.

    A tree's expected tokens a round are 1 + Σ of its paths' gains: a round accepts a path when
    the path begins its true ranks, and the drafter was not stopped before.
    """
    gain: Counter[Path] = Counter()
    reach: Counter[int] = Counter()
    passes: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    for traced in traces:
        made = traced.passes(block, most, log_threshold)
        deepest = min(traced.limit, made * block)
        gain.update(
            traced.ranks[:length] for length in range(1, min(deepest, len(traced.ranks)) + 1)
        )
        reach[deepest] += 1
        passes[made] += 1
        asked.update(j for j in range(1, made + 1) if j < most and j * block < traced.limit)
    total = len(traces)
    return Odds(
        {path: count / total for path, count in gain.items()},
        _at_least(reach, most * block, total),
        _at_least(passes, most, total),
        [asked[j] / total for j in range(most + 1)],
    )


def _at_least(counts: Counter[int], most: int, total: int) -> list[float]:
    """Return the share of what is i or more in entry i."""
    return [sum(n for value, n in counts.items() if value >= i) / total for i in range(most + 1)]


@dataclass(frozen=True)
class DepthRow:
    """Holds depth d of an acceptance table.

    Attributes:
        depth: 1 is the root's child.
        rounds: that had a true token there, all before it being proposed.
        ranks: entry r: share of them whose true token is the candidate of rank r.
        beyond: share whose true token is none of these.
    """

    depth: int
    rounds: int
    ranks: list[float]
    beyond: float


def table(traces: Iterable[TracedRound], ranks: int, *, first: bool = False) -> list[DepthRow]:
    """Acceptance by rank and depth, given that the path before is right.

    Args:
        traces: rounds.
        ranks: W, ranks that have an entry of their own.
        first: count only rounds whose path before is all first candidates, a chain's.
    """
    counts: dict[int, Counter[int]] = {}
    for traced in traces:
        for depth in range(1, traced.known + 1):
            before = traced.ranks[: depth - 1]
            if len(before) < depth - 1 or (first and any(before)):
                break
            rank = traced.ranks[depth - 1] if depth <= len(traced.ranks) else ranks
            counts.setdefault(depth, Counter())[min(rank, ranks)] += 1
    return [_row(depth, counts[depth], ranks) for depth in sorted(counts)]


def _row(depth: int, counts: Counter[int], ranks: int) -> DepthRow:
    total = counts.total()
    return DepthRow(depth, total, [counts[r] / total for r in range(ranks)], counts[ranks] / total)


WIDTH = 64
"""Candidates of a position that have a rank."""


@dataclass(frozen=True)
class TracedRound:
    """Holds what decides a round.

    Attributes:
        ranks: of the true tokens, from the root on, as long as they are among the candidates and
            add to the text. A tree that holds the first n of them emits n + 1 tokens.
        known: true tokens that could be found; fewer than requested at a text's end.
        confidence: the drafter's log-probability of its own likeliest path after each pass.
        limit: longest path that the round may draft.
    """

    ranks: Path
    known: int
    confidence: tuple[float, ...]
    limit: int

    def passes(self, block: int, most: int, log_threshold: float) -> int:
        """Count a round's passes under the ``confidence`` controller (``-inf``: ``fixed``)."""
        made = 1
        while made < most and made * block < self.limit:
            sure = self.confidence[made - 1] if made <= len(self.confidence) else -math.inf
            if sure < log_threshold:
                break
            made += 1
        return made


@dataclass(frozen=True)
class DraftingPolicy:
    """States which tree the traced rounds accept by.

    Attributes:
        paths: the tree's.
        log_threshold: of the ``confidence`` controller; ``-inf`` is ``fixed``.
    """

    paths: Collection[Path]
    log_threshold: float = -math.inf

    def accepted(self, traced: TracedRound, block: int) -> int:
        """Count the draft tokens that a round accepts and that add to the text."""
        height = max(map(len, self.paths), default=0)
        passes = traced.passes(block, -(-height // block), self.log_threshold)
        deepest = min(traced.limit, passes * block, len(traced.ranks))
        count = 0
        while count < deepest and traced.ranks[: count + 1] in self.paths:
            count += 1
        return count


@torch.inference_mode()
def trace(
    text: Text,
    drafter: Drafter,
    policy: DraftingPolicy,
    *,
    depth: int,
    lowest: float,
    skip: int = 0,
) -> list[TracedRound]:
    """Trace every round that decoding with a tree has, and continue as it would.

    Args:
        text: what is decoded.
        drafter: with block k.
        policy: the tree, and when to stop drafting.
        depth: longest path that is looked at.
        lowest: log-confidence below which no threshold lies: no need to trace further.
        skip: answer tokens that count as the prompt's: other rounds of the same text.
    """
    reader, traces = Reader(text, drafter, skip), []
    policy = DraftingPolicy(frozenset(policy.paths), policy.log_threshold)
    while reader.room:
        traces.append(trace_round(reader, depth, lowest))
        reader.advance(policy.accepted(traces[-1], drafter.block) + 1)
    return traces


def trace_round(reader: Reader, depth: int, lowest: float) -> TracedRound:
    """Trace one round from here on. The last true token adds nothing as a draft."""
    drafter, block = reader.drafter, reader.drafter.block
    truth = reader.truth(min(depth, reader.room - 1))
    frontier: Frontier | None = Frontier.root(reader.root.device)
    ranks: list[int] = []
    confidence: list[float] = []
    pathfinder = _Pathfinder(block)
    while frontier is not None:
        logits = drafter.draft(frontier).target_logits
        before = confidence[-1] if confidence else 0.0
        confidence.append(before + _sureness(logits[0]))
        wanted = truth[len(ranks) :][:block] if len(ranks) == pathfinder.depth else []
        ranks += _ranks(logits[-1], wanted)
        pathfinder.depth += block
        alive = len(ranks) == pathfinder.depth < len(truth)
        own = confidence[-1] >= lowest and logits.shape[1] == block
        more = pathfinder.depth < depth and pathfinder.depth < reader.limit
        frontier = pathfinder.next(logits, truth, alive, own) if more else None
    return TracedRound(tuple(ranks), len(truth), tuple(confidence), reader.limit)


class _Pathfinder:
    """Frontiers of one block or two: the drafter's own likeliest path, and the true one.

    While they are the same it is one block. The own path comes first, as in a tree.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.depth = 0
        self._one = True  # whether both are the same so far
        self._asked = (True, True)

    def next(self, logits: Tensor, truth: Sequence[int], alive: bool, own: bool) -> Frontier | None:
        """Return the next pass of the paths that still matter, ``[F, k]`` tokens."""
        true_tokens = truth[self.depth - self.block : self.depth]
        own_tokens: list[int] = logits[0].argmax(-1).tolist() if own else []
        parent = 0 if self._one or not self._asked[0] else 1
        self._one = self._one and alive and own and own_tokens == true_tokens
        blocks = [(own_tokens, 0)] if own and self._asked[0] else []
        if alive and not self._one:
            blocks.append((list(true_tokens), parent))
        self._asked = (own and self._asked[0], alive)
        if not blocks:
            return None
        tokens, parents = zip(*blocks, strict=True)
        device = logits.device
        return Frontier(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))


def _sureness(logits: Tensor) -> float:
    """Return the log-probability of the first candidates of a block, ``[k, V]``."""
    return float(logits.float().log_softmax(-1).amax(-1).sum()) if logits.shape[0] else -math.inf


def _ranks(logits: Tensor, truth: Sequence[int]) -> list[int]:
    """Return the ranks of the true tokens in ``[k, V]``, up to the first that is not proposed."""
    if not truth:
        return []
    scores, tokens = logits.float().topk(min(WIDTH, logits.shape[-1]), dim=-1)
    found: list[int] = []
    for token, row, score in zip(truth, tokens.tolist(), scores.tolist(), strict=False):
        if token not in row or score[row.index(token)] == -math.inf:
            break
        found.append(row.index(token))
    return found


@dataclass(frozen=True)
class Estimate:
    """Estimates a method's figures over all texts; every text begins with a prefill and its token.

    Attributes:
        tau: tokens a round, the target's own one included.
        nodes: draft tokens verified a round.
        passes: of the drafter, a round.
        milliseconds: a round.
        rate: tokens a second of all rounds, the prefill left out.
        tokens_per_second: the prefill counted.
        speedup: over plain decoding, the prefill counted; 95 % interval over texts.
    """

    tau: float
    nodes: float
    passes: float
    milliseconds: float
    rate: float
    tokens_per_second: float
    speedup: Interval

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def estimate(
    engine: SpeculativeEngine, texts: Sequence[Text], costs: Costs, *, builder: str, asked: bool
) -> Estimate:
    """Estimate an engine's figures by replaying it on the texts.

    Args:
        engine: whose drafter, builder and controller are used.
        texts: the target's own.
        costs: of this machine.
        builder: name of the tree builder.
        asked: whether the controller decides after every pass.
    """
    rounds = [
        list(replay(text, engine.drafter, engine.tree_builder, engine.controller)) for text in texts
    ]
    tokens = [sum(r.emitted for r in of_text) for of_text in rounds]
    seconds = [
        sum(costs.round(r, builder=builder, asked=asked) for r in of_text) for of_text in rounds
    ]
    plain = [costs.plain_prefill + costs.step * count for count in tokens]
    wall = [costs.prefill + each for each in seconds]
    written = [count + 1 for count in tokens]
    count = max(sum(map(len, rounds)), 1)
    return Estimate(
        tau=sum(tokens) / count,
        nodes=sum(r.nodes for of in rounds for r in of) / count,
        passes=sum(len(r.blocks) for of in rounds for r in of) / count,
        milliseconds=1000 * sum(seconds) / count,
        rate=sum(tokens) / max(sum(seconds), 1e-12),
        tokens_per_second=sum(written) / sum(wall),
        speedup=paired_ratio((plain, written), (wall, written)),
    )
