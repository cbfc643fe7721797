"""Many prompts, B of them at a time: the loop is ``BatchEngine.stream``.

A row whose text has ended goes to a prompt that waits. Rows share the target's passes and nothing
else, so each prompt's text is what it would be alone.

Shapes: B rows, P prompt tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.generation import Generation, clock_for
from falcon_lab.decoding.memory import check_kv_memory
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.round import PlainRounds, Row, SpeculativeRounds, share_out
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.errors import FalconLabError
from falcon_lab.sampling import Sampling


class BatchEngine:
    """An engine for one sequence, made to decode up to ``rows`` of them side by side.

    Its tree builder, acceptance rule and controller are copied for every row, and its drafter too
    unless it can draft for several sequences itself (``batch_drafting.py``).

    Args:
        engine: plain or speculative.
        rows: B, most sequences at a time.

    Raises:
        FalconLabError: ``rows`` is less than 1.
    """

    def __init__(self, engine: PlainEngine | SpeculativeEngine, rows: int) -> None:
        if rows < 1:
            raise FalconLabError(f"a batch has at least one row, not {rows}")
        self.engine = engine
        self.target = engine.target
        self.rows = rows

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own."""
        return self.engine.lossless

    def generate(
        self,
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        stop: StopCondition,
    ) -> list[Generation]:
        """``stream``, in the order of the prompts."""
        found = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            generators=generators,
            stop=stop,
        )
        return [generation for _, generation in sorted(found, key=lambda pair: pair[0])]

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        stop: StopCondition,
    ) -> Iterator[tuple[int, Generation]]:
        """Continue prompts; each one's number and text as soon as it has ended.

        A text's ``seconds`` are its share of the time: a part of a round counts evenly for the
        rows that took part in it. So those of all texts add up to the whole.

        Args:
            prompts: ``[P]`` long each, at least one token, on the target's device.
            max_new_tokens: most tokens to add to each.
            sampling: how tokens are drawn from the target.
            generators: each prompt's own source of randomness, on the target's device.
            stop: what ends a text.

        Raises:
            FalconLabError: a prompt is empty or longer than the target's context, or there is no
                memory for the keys and values of all rows (``decoding.kv_memory`` is for all of
                them together).
        """
        transcripts = [
            begin(prompt, max_new_tokens, self.target.max_positions, stop) for prompt in prompts
        ]
        if not prompts:
            return
        waiting = [
            Row(number, *parts)
            for number, parts in enumerate(zip(prompts, transcripts, generators, strict=True))
        ]
        session = _Session(self.engine, waiting, self.rows, sampling)
        while session.rows:
            for place in reversed(range(len(session.rows))):
                while (row := session.rows[place]).ended:
                    yield row.number, row.generation()
                    if not session.replace(place):
                        break
            if session.rows:
                session.rounds.round(session.rows, session.cache)


class _Session:
    """The rows of one call.

    Attributes:
        rows: those in use, by place.
        waiting: those that have no place yet.
        cache: the target's.
        rounds: what a round does.
    """

    def __init__(
        self,
        engine: PlainEngine | SpeculativeEngine,
        waiting: Sequence[Row],
        most: int,
        sampling: Sampling,
    ) -> None:
        self._engine = engine
        count = min(most, len(waiting))
        longest = max(len(row.prompt) + row.transcript.remaining for row in waiting)
        self._check_memory(count, longest)
        self.rounds = self._rounds(sampling, count, longest)
        self.cache = engine.target.new_batch_cache(count, longest + self._nodes)
        self.waiting = deque(waiting)
        self.rows: list[Row] = []
        for place in range(count):
            self.rows.append(self._admit(place))

    def replace(self, place: int) -> bool:
        """The next prompt in place of a row that has ended; without one the last row moves there.

        Returns:
            Whether there is a new prompt.
        """
        if self.waiting:
            self.rows[place] = self._admit(place)
            return True
        self.cache.drop(place)
        last = self.rows.pop()
        if place < len(self.rows):
            self.rows[place] = last
            self.rounds.move(len(self.rows), place)
        return False

    def _admit(self, place: int) -> Row:
        """Read the next prompt into a row of the cache; no other row is touched."""
        row = self.waiting.popleft()
        clock = clock_for(self._engine.target.device)
        own = self.cache.open(place)
        self.rounds.admit(place, row, own)
        self.cache.fill(place, own.length)
        row.transcript.extend([int(row.root)])
        clock.lap("prefill")
        share_out(clock, [row])
        return row

    @property
    def _nodes(self) -> int:
        """Of the largest tree, beyond the text."""
        engine = self._engine
        return 0 if isinstance(engine, PlainEngine) else engine.max_nodes

    def _rounds(
        self, sampling: Sampling, count: int, longest: int
    ) -> PlainRounds | SpeculativeRounds:
        if isinstance(self._engine, PlainEngine):
            return PlainRounds(self._engine, sampling)
        return SpeculativeRounds(self._engine, sampling, count, longest)

    def _check_memory(self, count: int, longest: int) -> None:
        engine, nodes = self._engine, self._nodes

        def bytes_of(length: int) -> int:
            own = 0
            if isinstance(engine, SpeculativeEngine):
                own = count * engine.drafter.kv_bytes(length, engine.tree_builder)
            return engine.target.batch_bytes(count, length + nodes) + own

        check_kv_memory(
            bytes_of,
            longest,
            limit_gib=engine.decoding.kv_memory,
            device=engine.target.device,
            sequences=count,
        )
