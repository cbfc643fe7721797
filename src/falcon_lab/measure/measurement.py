"""Measure methods pairwise: every method on every prompt, in one process, in turns.

Shapes: P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from falcon_lab.bars import BAR_DELAY, Bar
from falcon_lab.config.schema import HF_GENERATE, PLAIN, EvaluationConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.metrics import Differences, Reader, ReadOnce, compare_with_plain
from falcon_lab.measure.records import Answer, Record, RoundColumns, Times
from falcon_lab.sampling import Sampling
from falcon_lab.timing import Stopwatch, rotated, torch_threads

if TYPE_CHECKING:
    from falcon_lab.decoding.generation import Generation
    from falcon_lab.decoding.stopping import StopCondition

Progress = Callable[[int, int, str], None]
"""Called with answers done, answers in all, and the method that comes next."""


class Engine(Protocol):
    """Answers a prompt."""

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own."""
        ...

    @property
    def opaque(self) -> bool:
        """Whether only a stopwatch outside can time it."""
        ...

    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        stop: StopCondition,
    ) -> Generation:
        """Continue ``prompt`` (``[P]`` long)."""
        ...


@dataclass
class Measurement:
    """Holds what was measured.

    Attributes:
        records: method -> its records, in the order of the prompts; methods in the table's.
        lossless: method -> whether its rule is lossless.
        repeats: timed passes over the prompts.
        warmup: prompts that every method decoded before.
    """

    records: dict[str, list[Record]] = field(default_factory=dict)
    lossless: dict[str, bool] = field(default_factory=dict)
    repeats: int = 1
    warmup: int = 0


def measure(
    engines: Mapping[str, Engine],
    prompts: Sequence[EncodedPrompt],
    config: EvaluationConfig,
    *,
    stop: StopCondition,
    hf: Engine | None = None,
    read: Reader | None = None,
    on_progress: Progress | None = None,
    journal: Journal | None = None,
    warm: Collection[str] = (),
) -> Measurement:
    """Let every method answer every prompt ``config.repeats`` times, after a warm-up.

    All methods answer a prompt before the next one comes, and who goes first moves on by one with
    every prompt and repeat: whatever slows the machine down slows all of them. The repeats are
    whole passes, far apart in time, so that their median drops a disturbance.

    Args:
        engines: method -> engine; ``plain`` is the loop that the others are compared with.
        prompts: with unique ids.
        config: lengths, sampling, repeats, warm-up, threads, seed.
        stop: when an answer ends.
        hf: Hugging Face's engine, a method of its own beside plain decoding.
        read: tells margin and noise where texts differ from plain decoding's.
        on_progress: None draws a progress bar.
        journal: with it the measurement resumes where an equal one stopped. A prompt that
            some method had not answered is answered by all of them again: what is compared was
            measured side by side, in one process.
        warm: methods that have answered in this process, and need no warm-up.

    Raises:
        FalconLabError: for no prompts.
    """
    if not prompts:
        raise FalconLabError("there is no prompt to evaluate on; see evaluation.prompts")
    session = _Session(_ordered(engines, hf), prompts, config, stop, journal, warm)
    with torch_threads(config.threads), _reporter(on_progress, session.answers) as report:
        session.warm_up(report)
        session.run(report)
    records = {name: session.records(name) for name in session.engines}
    if PLAIN in records and config.temperature == 0:
        _compare(records, prompts, read, journal)
    lossless = {n: e.lossless for n, e in session.engines.items()}
    return Measurement(records, lossless, session.repeats, session.warmups)


def answered(
    journal: Journal, methods: Sequence[str], prompts: Sequence[EncodedPrompt], repeats: int
) -> dict[tuple[int, int], dict[str, list[Answer]]]:
    """Return what an earlier process has measured of all methods, by repeat and place."""
    found = {
        (repeat, place): journal.group(repeat, prompt.id, methods)
        for repeat in range(max(1, repeats))
        for place, prompt in enumerate(prompts)
    }
    return {at: group for at, group in found.items() if group is not None}


def is_finished(
    journal: Journal, methods: Sequence[str], prompts: Sequence[EncodedPrompt], repeats: int
) -> bool:
    """Return whether a measurement has no turns left."""
    return len(answered(journal, methods, prompts, repeats)) == max(1, repeats) * len(prompts)


def _compare(
    records: Mapping[str, list[Record]],
    prompts: Sequence[EncodedPrompt],
    read: Reader | None,
    known: Differences | None,
) -> None:
    """Fill in every method's agreement with plain decoding, prompt by prompt."""
    bar = Bar(prompts, desc="texts compared", unit="prompt", delay=BAR_DELAY, leave=False)
    for number, prompt in enumerate(bar):
        once = None if read is None else ReadOnce(read)
        plain = records[PLAIN][number]
        for name, of_method in records.items():
            if name != PLAIN:
                of_method[number] = compare_with_plain(
                    plain, of_method[number], prompt, once, known
                )


def _ordered(engines: Mapping[str, Engine], hf: Engine | None) -> dict[str, Engine]:
    """Put plain decoding first, then Hugging Face's, then the rest as they come."""
    first = {PLAIN: engines[PLAIN]} if PLAIN in engines else {}
    beside = {HF_GENERATE: hf} if hf is not None else {}
    return {**first, **beside, **{n: e for n, e in engines.items() if n != PLAIN}}


class _Session:
    """Holds one measurement while it runs."""

    def __init__(
        self,
        engines: dict[str, Engine],
        prompts: Sequence[EncodedPrompt],
        config: EvaluationConfig,
        stop: StopCondition,
        journal: Journal | None = None,
        warm: Collection[str] = (),
    ) -> None:
        self.engines = engines
        self.prompts = prompts
        self.config = config
        self.stop = stop
        self.sampling = Sampling(config.temperature, config.top_k, config.top_p)
        self.repeats = max(1, config.repeats)
        self.warmups = min(config.warmup, len(prompts))
        self.journal = journal
        self.known = {} if journal is None else answered(journal, [*engines], prompts, self.repeats)
        pending = self.repeats * len(prompts) - len(self.known)
        self.cold = [name for name in engines if name not in warm]
        self.answers = len(self.cold) * self.warmups + len(engines) * pending if pending else 0
        self.taken: dict[tuple[str, int], list[list[Answer]]] = {}

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Answer untimed: allocators, kernels and caches are then as they will be."""
        for place in range(self.warmups if self.answers else 0):
            for name in self.cold:
                report(name)
                self.answer(name, place)

    def run(self, report: Callable[[str], None]) -> None:
        """Make all timed passes."""
        names = list(self.engines)
        for repeat in range(self.repeats):
            for place in range(len(self.prompts)):
                group = self.known.get((repeat, place))
                if group is None:
                    group = self._group(rotated(names, repeat + place), repeat, place, report)
                for name, turns in group.items():
                    self.taken.setdefault((name, place), []).append(turns)

    def _group(
        self, names: Sequence[str], repeat: int, place: int, report: Callable[[str], None]
    ) -> dict[str, list[Answer]]:
        """Let every method answer, in this order."""
        group = {}
        for name in names:
            report(name)
            group[name] = self.answer(name, place)
            if self.journal is not None:
                self.journal.add(repeat, self.prompts[place].id, name, group[name])
        return group

    def answer(self, name: str, place: int) -> list[Answer]:
        """Hold one conversation, turn by turn; its seed depends on the prompt alone."""
        prompt = self.prompts[place]
        generator = torch.Generator(device=prompt.device)
        generator.manual_seed(self.config.seed + 1_000_003 * place)
        turns: list[Answer] = []
        for _ in prompt.turns:
            tokens = prompt.tokens([turn.tokens for turn in turns])
            turns.append(self._turn(name, prompt, tokens, generator))
        return turns

    def _turn(
        self, name: str, prompt: EncodedPrompt, tokens: Tensor, generator: torch.Generator
    ) -> Answer:
        engine = self.engines[name]
        with Stopwatch(tokens.device) as watch:
            out = engine.generate(
                tokens,
                max_new_tokens=self.config.max_new_tokens,
                sampling=self.sampling,
                generator=generator,
                stop=self.stop,
            )
        return Answer(
            prompt_tokens=tokens.shape[0],
            tokens=[int(token) for token in out.tokens],
            text=self._text(prompt, out.tokens),
            finish=out.finish,
            times=Times(watch.wall) if engine.opaque else _times(watch.wall, out),
            rounds=_columns(out),
        )

    def _text(self, prompt: EncodedPrompt, tokens: list[int]) -> str:
        """Return the answer's text without what a stop string cuts off."""
        if self.stop.strings:
            return self.stop.text(tokens)
        return prompt.text(tokens)

    def records(self, name: str) -> list[Record]:
        """Return the method's record of every prompt."""
        return [self._record(name, place) for place in range(len(self.prompts))]

    def _record(self, name: str, place: int) -> Record:
        prompt, repeats = self.prompts[place], self.taken[name, place]
        walls = [sum(turn.times.wall for turn in turns) for turns in repeats]
        answers = [[turn.tokens for turn in turns] for turns in repeats]
        return Record(
            method=name,
            prompt=prompt.id,
            category=prompt.category,
            turns=repeats[walls.index(median_low(walls))],
            wall_repeats=walls,
            repeats_agree=all(answer == answers[0] for answer in answers),
        )


def _times(wall: float, out: Generation) -> Times:
    s = out.seconds
    return Times(wall, s.prefill, s.total, s.draft, s.verify, s.accept, s.commit, s.overhead)


def _columns(out: Generation) -> RoundColumns:
    return RoundColumns(
        nodes=[r.nodes + r.auxiliary for r in out.rounds],
        depth=[r.depth for r in out.rounds],
        passes=[r.passes for r in out.rounds],
        accepted=[r.accepted for r in out.rounds],
        emitted=[r.emitted for r in out.rounds],
        layers=[r.layers for r in out.rounds if r.layers is not None],
    )


@contextmanager
def _reporter(on_progress: Progress | None, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the method that comes next: the caller's, or a progress bar."""
    if on_progress is not None:
        yield _counting(on_progress, total)
        return
    if not total:  # all of it was measured before
        yield lambda method: None
        return

    with Bar(total=total, desc="evaluate", unit="answer") as bar:
        started = False

        def report(method: str) -> None:
            nonlocal started
            bar.update(int(started))
            started = True
            bar.set_postfix_str(method, refresh=False)

        yield report
        bar.update(1)


def _counting(on_progress: Progress, total: int) -> Callable[[str], None]:
    done = 0

    def report(method: str) -> None:
        nonlocal done
        on_progress(done, total, method)
        done += 1

    return report
