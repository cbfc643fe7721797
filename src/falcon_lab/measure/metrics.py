"""Compute what is reported about a method, with exact definitions and who else uses them.

Sums are taken over all rounds of all prompts before any division, so a long answer weighs more
than a short one. "Accepted" counts draft tokens alone; the bonus token (or correction) that the
target adds to every round is counted only where its definition includes it.

Shapes: P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from falcon_lab.decoding.rounding import Reading, is_tie
from falcon_lab.measure import statistics
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.records import Record, RoundColumns, Times, tokens_per_second, total_times

Reader = Callable[[Tensor, Sequence[int]], Reading]
"""Reads plain decoding's text behind a prompt ``[P]`` again, which another one has left
(``rounding.read_again``)."""


class ReadOnce:
    """Reads a prompt's texts again, each once, however many methods have left it.

    Args:
        read: reads one.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._known: dict[tuple[int, ...], Reading] = {}

    def __call__(self, before: Tensor, tokens: Sequence[int]) -> Reading:
        """Return the reading of the text behind ``before``, ``[P]``."""
        key = (*before.tolist(), *tokens)
        if key not in self._known:
            self._known[key] = self._read(before, tokens)
        return self._known[key]


class Differences(Protocol):
    """Keeps what was found where texts part, under a name for the texts."""

    def difference(self, key: str) -> tuple[float, float | None] | None:
        """Return margin and noise; None where they are not known."""
        ...

    def add_difference(self, key: str, margin: float, noise: float | None) -> None:
        """Keep them."""
        ...


def compare_with_plain(
    plain: Record,
    record: Record,
    prompt: EncodedPrompt,
    read: Reader | None,
    known: Differences | None = None,
) -> Record:
    """Return the record with its agreement with plain decoding filled in.

    Args:
        plain: plain decoding's record of the same prompt.
        record: the method's.
        prompt: of both.
        read: tells margin and noise of texts that differ; None leaves them out.
        known: those that were read before, and keeps these.
    """
    for turn, (expected, got) in enumerate(zip(plain.turns, record.turns, strict=True)):
        place = first_difference(expected.tokens, got.tokens)
        if place is not None:
            margin = noise = None
            if read is not None:
                before = prompt.tokens([t.tokens for t in plain.turns[:turn]])
                margin, noise = _apart(before, expected.tokens, got.tokens, place, read, known)
            return replace(
                record,
                identical=False,
                difference_turn=turn,
                difference_position=place,
                margin=margin,
                noise=noise,
            )
    return replace(record, identical=True)


def _apart(
    before: Tensor,
    expected: list[int],
    got: list[int],
    place: int,
    read: Reader,
    known: Differences | None,
) -> tuple[float, float | None]:
    """Return margin and noise where two texts part; read again unless it is known."""
    texts = json.dumps([before.tolist(), expected, got[: place + 1], len(got) > place])
    key = hashlib.sha256(texts.encode()).hexdigest()[:16]
    if known is not None and (kept := known.difference(key)) is not None:
        return kept
    found = read(before, expected)
    margin = _margin(found.logits[place], expected, got, place)
    if known is not None:
        known.add_difference(key, margin, found.noise)
    return margin, found.noise


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Find where two answers part, which is the end of one that begins the other; None if equal."""
    for place, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _margin(logits: Tensor, expected: list[int], got: list[int], place: int) -> float:
    if place < min(len(expected), len(got)):
        return float(logits[expected[place]] - logits[got[place]])
    best = logits.topk(2).values
    return float(best[0] - best[1])


DEFINITIONS: dict[str, str] = {
    "tokens_per_second": (
        "new tokens over wall time, end to end: the prompt's prefill is in the time"
    ),
    "decode_tokens_per_second": (
        "tokens of all rounds over the time of all rounds: the prefill, and the token that it "
        "gives, are left out"
    ),
    "speedup": (
        "wall time per token of plain decoding over the method's, end to end, on the same prompts "
        "in the same process and with the same loop; 95 % interval of a paired bootstrap over "
        "prompts"
    ),
    "tau": (
        "tokens emitted per round, the target's own token counted: 1 + accepted/rounds but for "
        "what EOS or a limit cut off (EAGLE's τ, vLLM's mean acceptance length, Spec-Bench's MAT)"
    ),
    "tau_draft": "draft tokens accepted per round, the target's own token not counted (Falcon's τ)",
    "alpha": (
        "accepted/(accepted + rounds): share of the output that the drafter wrote (Falcon's α); "
        "not the probability that a draft token is accepted"
    ),
    "acceptance": (
        "share of all rounds whose accepted path reaches position i (vLLM's per-position rate)"
    ),
    "acceptance_conditional": (
        "the same among rounds that drafted position i and accepted position i-1 "
        "(speculators' conditional rate; EAGLE's n-α on a chain)"
    ),
    "nodes_per_round": (
        "draft tokens and auxiliary nodes that the target verified per round, the root not counted"
    ),
    "passes_per_round": "drafter passes per round",
    "layers_per_token": (
        "for a method that drafts with the target's own layers: decoder layers that the target's "
        "passes go through, in drafting and verification, per token of the rounds; a pass over "
        "several tokens counts once, a layer's attention or feed-forward network alone half; plain "
        "decoding goes through all of them for each token"
    ),
    "time_split": (
        "share of decoding time, in %: the drafter's passes, verification by the target, "
        "acceptance and commit, tree building and the rest of the loop; sums to 100"
    ),
    "identical_share": "share of prompts whose tokens are plain decoding's, every one of them",
    "divergence_rate": (
        "first differences from plain decoding per token compared (those up to and including the "
        "first difference)"
    ),
    "largest_margin": (
        "the widest gap between the target's logits of the two tokens at a first difference; "
        "near zero means that rounding decided, wide means a fault"
    ),
    "ties": (
        "prompts on which the tokens part from plain decoding's at a tie: where the logits of the "
        "two tokens are nearer to each other than the width of a pass moves them in this type"
    ),
    "distinct": "distinct tokens over new tokens, mean over prompts; low means that output loops",
}
"""Metric -> its definition, as the report prints it."""


@dataclass(frozen=True)
class TimeSplit:
    """Shares of decoding time in %; they sum to 100."""

    draft: float
    verify: float
    accept_commit: float
    overhead: float


@dataclass(frozen=True)
class MethodSummary:
    """One method over all prompts. ``DEFINITIONS`` says what each figure is.

    Figures about rounds are None for a method without rounds, those about drafting for one that
    drafts nothing.
    """

    method: str
    lossless: bool
    prompts: int
    new_tokens: int
    wall: float
    tokens_per_second: float
    decode_tokens_per_second: float | None
    speedup: statistics.Interval | None
    tau: float | None
    tau_draft: float | None
    alpha: float | None
    acceptance: list[float]
    acceptance_conditional: list[float | None]
    accepted_histogram: list[int]
    nodes_per_round: float | None
    passes_per_round: float | None
    rounds: int
    time_split: TimeSplit | None
    milliseconds_per_token: dict[str, float]
    identical_share: float | None
    divergence_rate: float | None
    largest_margin: float | None
    repeats_agree: bool
    distinct: float
    finish: dict[str, int]
    ties: int = 0
    layers_per_token: float | None = None


def summarise(
    records: Sequence[Record], plain: Sequence[Record] | None, *, lossless: bool, seed: int = 0
) -> MethodSummary:
    """Compute all figures of one method.

    Args:
        records: the method's, one a prompt.
        plain: plain decoding's records of the same prompts; None leaves the speed-up out.
        lossless: whether the acceptance rule is lossless.
        seed: of the bootstrap.
    """
    rounds = sum((record.rounds for record in records), RoundColumns())
    times = total_times(records)
    new_tokens = sum(len(record.tokens) for record in records)
    positions = acceptance(rounds)
    return MethodSummary(
        method=records[0].method,
        lossless=lossless,
        prompts=len(records),
        new_tokens=new_tokens,
        wall=times.wall,
        tokens_per_second=new_tokens / times.wall,
        decode_tokens_per_second=_ratio(sum(rounds.emitted), times.decode) or None,
        speedup=statistics.speedup(plain, records, seed=seed) if plain and new_tokens else None,
        **_drafting(rounds),
        acceptance=positions[0],
        acceptance_conditional=positions[1],
        accepted_histogram=_histogram(rounds) if sum(rounds.nodes) else [],
        rounds=len(rounds),
        time_split=time_split(times),
        milliseconds_per_token=milliseconds_per_token(times, new_tokens),
        **_agreement(records),
        repeats_agree=all(record.repeats_agree for record in records),
        distinct=sum(record.distinct for record in records) / len(records),
        finish=_finishes(records),
        ties=sum(is_tie(record.margin, record.noise) for record in records),
        layers_per_token=_ratio(sum(rounds.layers), sum(rounds.emitted)) or None,
    )


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _drafting(rounds: RoundColumns) -> dict[str, float | None]:
    """Compute the figures of rounds that draft; all None when no round did."""
    names = ("tau", "tau_draft", "alpha", "nodes_per_round", "passes_per_round")
    if not sum(rounds.nodes):
        return dict.fromkeys(names)
    count, accepted = len(rounds), sum(rounds.accepted)
    values = (
        sum(rounds.emitted) / count,
        accepted / count,
        accepted / (accepted + count),
        sum(rounds.nodes) / count,
        sum(rounds.passes) / count,
    )
    return dict(zip(names, values, strict=True))


def acceptance(rounds: RoundColumns) -> tuple[list[float], list[float | None]]:
    """Return, per position 1, 2, …, the unconditional and the conditional share of accepted rounds.

    The conditional one is None where no round reached the position.
    """
    unconditional: list[float] = []
    conditional: list[float | None] = []
    for position in range(1, max(rounds.depth, default=0) + 1):
        hits = sum(a >= position for a in rounds.accepted)
        chances = sum(
            a >= position - 1 and d >= position
            for a, d in zip(rounds.accepted, rounds.depth, strict=True)
        )
        unconditional.append(hits / len(rounds))
        conditional.append(_ratio(hits, chances))
    return unconditional, conditional


def time_split(times: Times) -> TimeSplit | None:
    """Return where decoding time went, in %; None for a method that cannot be looked into."""
    parts = _parts(times)
    whole = sum(parts.values())
    if not whole:
        return None
    return TimeSplit(**{name: 100 * seconds / whole for name, seconds in parts.items()})


def milliseconds_per_token(times: Times, new_tokens: int) -> dict[str, float]:
    """Return end-to-end milliseconds per new token, by part: the parts sum to the wall time.

    ``other`` is what lies between the engine's own clock and the wall clock around it; a method
    that cannot be looked into has nothing else.
    """
    if not new_tokens:
        return {}
    parts = _parts(times)
    if parts:
        parts = {"prefill": times.prefill or 0.0, **parts}
    parts["other"] = max(0.0, times.wall - sum(parts.values()))
    return {name: 1000 * seconds / new_tokens for name, seconds in parts.items()}


def _parts(times: Times) -> dict[str, float]:
    if None in (times.draft, times.verify, times.accept, times.commit, times.overhead):
        return {}
    return {
        "draft": times.draft or 0.0,
        "verify": times.verify or 0.0,
        "accept_commit": (times.accept or 0.0) + (times.commit or 0.0),
        "overhead": times.overhead or 0.0,
    }


def _histogram(rounds: RoundColumns) -> list[int]:
    return [rounds.accepted.count(a) for a in range(max(rounds.accepted) + 1)]


def _agreement(records: Sequence[Record]) -> dict[str, Any]:
    """Summarise the agreement with plain decoding; None where none is expected."""
    judged = [record for record in records if record.identical is not None]
    margins = [abs(record.margin) for record in judged if record.margin is not None]
    differing = sum(not record.identical for record in judged)
    return {
        "identical_share": _ratio(len(judged) - differing, len(judged)),
        "divergence_rate": _ratio(differing, sum(map(_compared, judged))),
        "largest_margin": max(margins, default=None),
    }


def _compared(record: Record) -> int:
    """Count the tokens up to and including the first difference."""
    if record.identical or record.difference_turn is None or record.difference_position is None:
        return len(record.tokens)
    before = sum(len(turn.tokens) for turn in record.turns[: record.difference_turn])
    return before + record.difference_position + 1


def _finishes(records: Sequence[Record]) -> dict[str, int]:
    finishes = [turn.finish for record in records for turn in record.turns]
    return {finish: finishes.count(finish) for finish in sorted(set(finishes))}


def summaries(
    records: Mapping[str, Sequence[Record]],
    lossless: Mapping[str, bool],
    *,
    plain: str = "plain",
    seed: int = 0,
) -> dict[str, MethodSummary]:
    """Compute every method's figures, in the order of ``records``; plain itself has no speed-up."""
    base = records.get(plain)
    return {
        method: summarise(
            of_method, None if method == plain else base, lossless=lossless[method], seed=seed
        )
        for method, of_method in records.items()
    }


def comparisons(
    records: Mapping[str, Sequence[Record]], *, seed: int = 0
) -> list[statistics.Comparison]:
    """Compare every pair of methods, the faster one first."""
    speed = {name: tokens_per_second(of) for name, of in records.items()}
    order = sorted((name for name in records if speed[name]), key=lambda n: speed[n], reverse=True)
    return [
        statistics.compare(records[fast], records[slow], seed=seed)
        for place, fast in enumerate(order)
        for slow in order[place + 1 :]
    ]
