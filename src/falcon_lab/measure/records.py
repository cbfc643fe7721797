"""Record what one method did with one prompt: the raw material of every metric.

A record holds plain values only, so that it goes to JSON and comes back unchanged. Nothing heavy is
imported here: results are also read where torch is not wanted. ``write_answers`` writes records in
the JSONL format of MT-bench and Spec-Bench, for scorers that read it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from falcon_lab.files import write_atomically


@dataclass(frozen=True)
class RoundColumns:
    """Describes the rounds of one answer, column by column, one entry a round.

    Attributes:
        nodes: draft tokens and auxiliary nodes verified (the root not counted).
        depth: draft tokens on the longest path.
        passes: drafter passes.
        accepted: draft tokens accepted.
        emitted: tokens that reached the answer: the accepted ones and the target's own, less
            what was cut off by EOS, a stop string or the length limit.
        layers: of the target that the round's passes went through; empty where drafting runs none.
    """

    nodes: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def is_even(self) -> bool:
        """Return whether every column that is there has an entry for every round."""
        found = {name: len(column) for name, column in vars(self).items()}
        return found.pop("layers") in (0, len(self)) and set(found.values()) == {len(self)}

    def __add__(self, other: RoundColumns) -> RoundColumns:
        return RoundColumns(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(RoundColumns))
        )


@dataclass(frozen=True)
class Times:
    """Says where the seconds went; all but ``wall`` are None for a method that is a black box.

    Attributes:
        wall: around the whole call, measured outside the engine, prefill included.
        prefill: reading the prompt.
        decode: all that follows; the sum of the next five.
        draft: drafter passes.
        verify: target forwards.
        accept: the acceptance rule.
        commit: moving positions of the KV cache, and the drafter's ``observe``.
        overhead: tree building and the rest of the loop.
    """

    wall: float
    prefill: float | None = None
    decode: float | None = None
    draft: float | None = None
    verify: float | None = None
    accept: float | None = None
    commit: float | None = None
    overhead: float | None = None

    def __add__(self, other: Times) -> Times:
        inside = {}
        for part in (f.name for f in fields(Times) if f.name != "wall"):
            mine, yours = getattr(self, part), getattr(other, part)
            inside[part] = None if mine is None or yours is None else mine + yours
        return Times(wall=self.wall + other.wall, **inside)


@dataclass(frozen=True)
class Answer:
    """Holds one answer.

    Attributes:
        prompt_tokens: tokens that the target had read when the answer began.
        tokens: the new tokens.
        text: the same as text.
        finish: ``eos``, ``stop``, ``length`` or ``context``.
        times: seconds.
        rounds: what the loop did; empty for a method that has no rounds.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    finish: str
    times: Times
    rounds: RoundColumns

    @classmethod
    def from_dict(cls, node: Mapping[str, Any]) -> Answer:
        """Read the answer that ``asdict`` wrote."""
        inside = {"times": Times(**node["times"]), "rounds": RoundColumns(**node["rounds"])}
        return cls(**{**node, **inside})


@dataclass(frozen=True)
class Record:
    """Holds one method on one prompt: the repeat with the median wall time (the lower of two).

    Attributes:
        method: name of the method.
        prompt: id of the prompt.
        category: the prompt's category.
        turns: the answers, turn by turn.
        wall_repeats: wall seconds of every repeat, in order.
        repeats_agree: whether every repeat gave the same tokens.
        identical: whether the tokens are those of plain decoding; None when nothing says they
            should be (sampling), and for plain itself.
        difference_turn: turn of the first differing token, or None.
        difference_position: its place in that answer, or None.
        margin: target logit of plain's token there minus that of this method's token (the gap
            between the two best ones where one answer had ended), or None. Near zero means that
            rounding decided; a wide margin means a fault.
        noise: how far the width of a pass moves such a margin in that text; None where nothing
            differs, or in a type whose rounding is no excuse.
    """

    method: str
    prompt: str
    category: str
    turns: list[Answer]
    wall_repeats: list[float]
    repeats_agree: bool = True
    identical: bool | None = None
    difference_turn: int | None = None
    difference_position: int | None = None
    margin: float | None = None
    noise: float | None = None

    @property
    def tokens(self) -> list[int]:
        """Return the new tokens of all turns."""
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def rounds(self) -> RoundColumns:
        """Return the rounds of all turns."""
        return sum((turn.rounds for turn in self.turns), RoundColumns())

    @property
    def times(self) -> Times:
        """Sum the seconds of all turns."""
        first, *rest = (turn.times for turn in self.turns)
        return sum(rest, first)

    @property
    def distinct(self) -> float:
        """Return distinct over new tokens (1 for an empty answer): low means that it loops."""
        tokens = self.tokens
        return len(set(tokens)) / len(tokens) if tokens else 1.0

    @property
    def accepted_histogram(self) -> list[int]:
        """Count the rounds that accepted a draft tokens, in entry a."""
        accepted = self.rounds.accepted
        return [accepted.count(a) for a in range(max(accepted, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds; what can be computed from the rest is written out too."""
        return asdict(self) | {
            "new_tokens": len(self.tokens),
            "distinct": self.distinct,
            "finish": self.turns[-1].finish,
            "accepted_histogram": self.accepted_histogram,
        }

    @classmethod
    def from_dict(cls, node: Mapping[str, Any]) -> Record:
        """Read the record that ``as_dict`` wrote."""
        turns = [Answer.from_dict(turn) for turn in node["turns"]]
        known = {f.name for f in fields(cls)} - {"turns"}
        return cls(turns=turns, **{key: node[key] for key in known})


def total_times(records: Sequence[Record]) -> Times:
    """Sum the seconds of at least one record."""
    first, *rest = (record.times for record in records)
    return sum(rest, first)


def tokens_per_second(records: Sequence[Record]) -> float:
    """Return new tokens over wall time, prompts together."""
    return sum(len(record.tokens) for record in records) / total_times(records).wall


def write_answers(path: Path, model_id: str, records: Iterable[Record]) -> None:
    """Write one line a prompt, the file whole or not at all.

    ``accept_lengths`` counts the tokens that each verification brought, the target's own among
    them, over all turns, and is 1 a token for plain decoding, as Spec-Bench has it.

    Args:
        path: the file.
        model_id: names the method.
        records: what it answered.

    Raises:
        FalconLabError: the file cannot be written; what was there before is still there.
    """
    now = time.time()
    lines = [json.dumps(answer(model_id, record, now), ensure_ascii=False) for record in records]
    write_atomically(path, "".join(line + "\n" for line in lines))


def answer(model_id: str, record: Record, tstamp: float) -> dict[str, Any]:
    """Return one line of the file."""
    emitted = [turn.rounds.emitted or [1] * len(turn.tokens) for turn in record.turns]
    return {
        # MT-bench numbers its questions, and scorers look them up by number.
        "question_id": int(record.prompt) if record.prompt.isdecimal() else record.prompt,
        "category": record.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{model_id}/{record.prompt}").hex,
        "model_id": model_id,
        "choices": [
            {
                "index": 0,
                "turns": [turn.text for turn in record.turns],
                "decoding_steps": [len(steps) for steps in emitted],
                "new_tokens": [len(turn.tokens) for turn in record.turns],
                "wall_time": [turn.times.wall for turn in record.turns],
                "accept_lengths": [length for steps in emitted for length in steps],
            }
        ],
        "tstamp": tstamp,
    }
