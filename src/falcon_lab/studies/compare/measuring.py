"""Measure all drafters of a comparison with every budget, in one process and in turns.

A prompt set at a temperature is one measurement. Plain decoding is the baseline of all heads, and
answers a prompt once a head, or ``MOST_BASELINES`` times spread evenly among many heads: the others
are compared with its median there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median_low
from typing import Any

from falcon_lab.config.schema import PLAIN, EvaluationConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import Setup
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.measurement import Engine, Measurement
from falcon_lab.measure.records import Record, tokens_per_second
from falcon_lab.measure.statistics import fastest_method
from falcon_lab.studies.bench.memory import peak_of
from falcon_lab.studies.compare.drafters import (
    Budgets,
    EngineKey,
    TrainedDrafter,
    described,
    engines_of,
)
from falcon_lab.studies.compare.plan import BEST, Head, NodeBudget, Plan
from falcon_lab.timing import torch_threads

MOST_BASELINES = 9
"""Turns of plain decoding on a prompt at most, of which the median counts."""


@dataclass(frozen=True)
class Measured:
    """Holds what was measured on one prompt set at one temperature.

    Attributes:
        prompt_set: its name.
        temperature: 0 is greedy.
        plain: the baseline's records.
        records: engine -> its records, prompts in the order of ``plain``.
        lossless: engine -> whether its rule is lossless.
        best: head -> the budget that ``best`` is; empty where it is not measured.
        tried: head -> budget of the grid -> tokens a second on the prompts that it was chosen on.
        peaks: engine -> bytes at its highest point, for the first seed; on the first prompt set
            alone.
        journal: where the records are.
    """

    prompt_set: str
    temperature: float
    plain: list[Record]
    records: dict[EngineKey, list[Record]]
    lossless: dict[EngineKey, bool]
    best: dict[str, NodeBudget]
    tried: dict[str, dict[str, float]]
    peaks: dict[EngineKey, int | None]
    journal: str


def refuse_unfit(head: Head, fitting: Collection[str], grid: Sequence[NodeBudget]) -> None:
    """Refuse a head that cannot spend any budget which its best is chosen from.

    Raises:
        FalconLabError: it cannot.
    """
    if not any(budget.word in fitting for budget in grid):
        raise FalconLabError(
            f"{head.name} fits no budget of tuning.grid; add own, or say how it spends one in "
            f"heads.{head.name}.spend"
        )


@dataclass(frozen=True)
class Comparison:
    """Holds everything that is compared, in one process.

    Attributes:
        plan: of the comparison.
        setup: builds and measures the engines.
        drafters: of all heads and seeds.
        prompts: name of a set -> its prompts.
    """

    plan: Plan
    setup: Setup
    drafters: list[TrainedDrafter]
    prompts: dict[str, list[EncodedPrompt]]

    def measure(self) -> Iterator[Measured]:
        """Measure every prompt set at every temperature.

        Where ``best`` is a budget it is chosen once a temperature, for all sets.
        """
        for temperature in self.plan.config.temperatures:
            best, tried = self._choose(temperature) if self.plan.wants_best else ({}, {})
            for prompt_set in self.prompts:
                yield self._measure_set(prompt_set, temperature, best, tried)

    def _measure_set(
        self,
        prompt_set: str,
        temperature: float,
        best: dict[str, NodeBudget],
        tried: dict[str, dict[str, float]],
    ) -> Measured:
        config, prompts = self.plan.evaluation(prompt_set, temperature), self.prompts[prompt_set]
        budgets = {head.name: self._budgets(best.get(head.name)) for head in self.plan.heads}
        engines = engines_of(self.drafters, budgets, self.setup)
        where = f"{prompt_set}, temperature {temperature:g}"
        self.setup.announce(f"{where}: {len(engines)} engines in turns")
        facts = {"engines": described(self.drafters, budgets)}
        found, journal = self._measure("compare", engines, facts, config, prompts)
        first = prompt_set == next(iter(self.prompts))  # an answer more of each: once is enough
        peaks = self._peaks(engines, journal, config, prompts[0]) if first else {}
        keys = {key: at for key, at in self._keys(best).items() if at in engines}
        return Measured(
            prompt_set,
            temperature,
            merged([found.records[name] for name in baselines(self.plan)]),
            {key: found.records[engine.name] for key, engine in keys.items()},
            {key: found.lossless[engine.name] for key, engine in keys.items()},
            best,
            tried,
            {key: peaks[engine] for key, engine in keys.items() if engine in peaks},
            str(journal.path),
        )

    def check(self) -> None:
        """See that everything can be measured: every engine decodes a bit at every temperature.

        Raises:
            FalconLabError: prompts, a head with some budget, or the way to sample cannot be used.
        """
        plan = self.plan
        named = [budget for budget in plan.budgets if budget.word != BEST]
        grid = plan.grid if plan.wants_best else []
        budgets: Budgets = {head.name: list(dict.fromkeys([*named, *grid])) for head in plan.heads}
        engines = engines_of(self.drafters, budgets, self.setup)
        if plan.wants_best:
            self._other_prompts()
            for head in plan.heads:
                refuse_unfit(head, {key.budget for key in engines if key.head == head.name}, grid)
        named_engines = {key.name: engine for key, engine in engines.items()}
        self.setup.rehearse(
            {PLAIN: self.setup.plain(), **named_engines},
            next(iter(self.prompts.values())),
            plan.config.temperatures,
        )

    def _budgets(self, best: NodeBudget | None) -> list[NodeBudget]:
        """Return a head's budgets, its best one among them if it is no other already."""
        found = [best if budget.word == BEST else budget for budget in self.plan.budgets]
        return list(dict.fromkeys(budget for budget in found if budget is not None))

    def _keys(self, best: Mapping[str, NodeBudget]) -> dict[EngineKey, EngineKey]:
        """Map what the tables list to the engine that was measured: ``best`` is one of them."""
        return {
            EngineKey(d.head.name, budget.word, d.seed): d.key(
                best[d.head.name] if budget.word == BEST else budget
            )
            for d in self.drafters
            for budget in self.plan.budgets
        }

    def _other_prompts(self) -> list[EncodedPrompt]:
        """Return the prompts that ``best`` is chosen on, of which none is measured on."""
        tuning, measured = self.plan.config.tuning, chain.from_iterable(self.prompts.values())
        return self.setup.other_prompts(tuning.source, tuning.prompts, list(measured))

    def _choose(
        self, temperature: float
    ) -> tuple[dict[str, NodeBudget], dict[str, dict[str, float]]]:
        """Choose the grid's fastest budget of every head, on prompts that are not measured on."""
        grid, prompts = self.plan.grid, self._other_prompts()
        config = replace(self.plan.base.evaluation, temperature=temperature, methods={}, repeats=1)
        first = [d for d in self.drafters if d.seed == d.head.seeds[0]]
        budgets: Budgets = {head.name: grid for head in self.plan.heads}
        engines = engines_of(first, budgets, self.setup)
        self.setup.announce(
            f"temperature {temperature:g}: choosing the best of {len(grid)} budgets for "
            f"every head on {len(prompts)} other prompts"
        )
        facts = {"engines": described(first, budgets)}
        found, _ = self._measure("tune", engines, facts, config, prompts)
        words, best, tried = {budget.word: budget for budget in grid}, {}, {}
        for head in (head.name for head in self.plan.heads):
            records = {key.budget: found.records[key.name] for key in engines if key.head == head}
            best[head] = words[fastest_method(records)]
            tried[head] = {word: tokens_per_second(of) for word, of in records.items()}
        return best, tried

    def _measure(
        self,
        kind: str,
        engines: Mapping[EngineKey, SpeculativeEngine],
        facts: dict[str, Any],
        config: EvaluationConfig,
        prompts: Sequence[EncodedPrompt],
    ) -> tuple[Measurement, Journal]:
        journal = self.setup.journal(self.plan.folder, kind, prompts, facts, config)
        return self.setup.measure(
            self._with_baselines(engines), prompts, config, journal=journal
        ), journal

    def _with_baselines(self, engines: Mapping[EngineKey, SpeculativeEngine]) -> dict[str, Engine]:
        """Return the engines in their order, plain decoding before those of every head."""
        plain, found = self.setup.plain(), dict[str, Engine]()
        turns = dict(zip(baseline_places(len(self.plan.heads)), baselines(self.plan), strict=True))
        for place, head in enumerate(self.plan.heads):
            if place in turns:
                found[turns[place]] = plain
            found |= {key.name: e for key, e in engines.items() if key.head == head.name}
        return found

    def _peaks(
        self,
        engines: Mapping[EngineKey, SpeculativeEngine],
        journal: Journal,
        config: EvaluationConfig,
        prompt: EncodedPrompt,
    ) -> dict[EngineKey, int | None]:
        """Measure the memory of one more answer of each engine with the first seed's drafter."""
        first = {head.name: head.seeds[0] for head in self.plan.heads}
        found = {}
        with torch_threads(config.threads):
            for key, engine in engines.items():
                if key.seed != first[key.head]:
                    continue
                if key.name not in journal.peaks():
                    answer = partial(self.setup.answer, engine, prompt, config=config)
                    peak = peak_of(answer, self.setup.target.device)
                    journal.add_peak(key.name, None if peak is None else peak.growth)
                found[key] = journal.peaks()[key.name]
        return found


def baselines(plan: Plan) -> list[str]:
    """Name plain decoding's turns: one a head, or as many as are allowed."""
    turns = len(baseline_places(len(plan.heads)))
    return [PLAIN, *(f"{PLAIN} {turn}" for turn in range(2, turns + 1))]


def baseline_places(heads: int) -> list[int]:
    """Return before which heads plain decoding takes its turns, spread evenly among them."""
    turns = min(heads, MOST_BASELINES)
    return [turn * heads // turns for turn in range(turns)]


def merged(turns: Sequence[Sequence[Record]]) -> list[Record]:
    """Return plain decoding's records: of every prompt the turn with the median wall time."""
    records = []
    for of_prompt in zip(*turns, strict=True):
        walls = [record.times.wall for record in of_prompt]
        middle = of_prompt[walls.index(median_low(walls))]
        records.append(replace(middle, method=PLAIN, identical=None, wall_repeats=walls))
    return records
