"""Measure all drafters of a comparison with every budget, in one process and in turns.

A prompt set at a temperature is one measurement. Plain decoding is the baseline of all heads, and
answers a prompt once a head, or ``MOST_BASELINES`` times spread evenly among many heads: the others
are compared with its median there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from statistics import median_low
from typing import Any, TypeVar

from falcon_lab.config.schema import PLAIN, EvaluationConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import Setup
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.measurement import Engine, Measurement, is_finished
from falcon_lab.measure.records import Record, tokens_per_second
from falcon_lab.measure.statistics import fastest_method
from falcon_lab.stored import fitting
from falcon_lab.studies.bench.memory import peak_of
from falcon_lab.studies.compare.drafters import (
    Budgets,
    EngineFacts,
    EngineKey,
    TrainedDrafter,
    described,
    facts_of,
)
from falcon_lab.studies.compare.plan import BEST, OWN, Head, NodeBudget, Plan
from falcon_lab.timing import torch_threads

E = TypeVar("E")

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
class Turns:
    """One measurement: which drafters answer which prompts, and how.

    Attributes:
        kind: ``compare``, or ``tune`` where budgets are chosen.
        drafters: that answer.
        budgets: of every head.
        config: lengths, sampling and repeats.
        prompts: that are answered.
    """

    kind: str
    drafters: Sequence[TrainedDrafter]
    budgets: Budgets
    config: EvaluationConfig
    prompts: Sequence[EncodedPrompt]

    @property
    def engines(self) -> Iterator[tuple[TrainedDrafter, NodeBudget]]:
        """Yield what an engine is made of, whether it fits its budget or not."""
        return ((one, budget) for one in self.drafters for budget in self.budgets[one.head.name])


@dataclass(frozen=True)
class Answered:
    """Stands for an engine whose answers are all there.

    Attributes:
        lossless: whether its rule is.
        opaque: as of an engine that tells its times.
    """

    lossless: bool
    opaque: bool = False

    def generate(self, *_: Any, **__: Any) -> Any:
        """Never answer."""
        raise AssertionError("all its answers are there")


@dataclass(frozen=True)
class Comparison:
    """Holds everything that is compared, in one process.

    An engine is made where it has turns left, once, and tried then; of the others the journals have
    the answers and the facts.

    Attributes:
        plan: of the comparison.
        setup: builds and measures the engines.
        drafters: of all heads and seeds.
        prompts: name of a set -> its prompts.
        facts: engine -> what is known of it, once it was measured or found among the answers.
    """

    plan: Plan
    setup: Setup
    drafters: list[TrainedDrafter]
    prompts: dict[str, list[EncodedPrompt]]
    facts: dict[EngineKey, EngineFacts] = field(default_factory=dict)
    _engines: dict[EngineKey, SpeculativeEngine] = field(default_factory=dict)
    _journals: dict[tuple[str, ...], Journal] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)

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
        turns = self._turns(prompt_set, temperature, best)
        journal = self._journal(turns)
        self._know(turns)
        fitting_keys = self._fitting(turns)
        where = f"{prompt_set}, temperature {temperature:g}"
        self.setup.announce(f"{where}: {len(fitting_keys)} engines in turns")
        found = self._measure(turns)
        first = prompt_set == next(iter(self.prompts))  # an answer more of each: once is enough
        peaks = self._peaks(turns) if first else {}
        keys = {key: at for key, at in self._keys(best).items() if at in fitting_keys}
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

    # --- what is there, and what is left ------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Return whether all answers are there, and nothing need be loaded; nothing is written."""
        for temperature in self.plan.config.temperatures:
            best: dict[str, NodeBudget] = {}
            if self.plan.wants_best:
                if not self._has_all(self._grid_turns(temperature)):
                    return False
                best, _ = self._choose(temperature)
            if not all(self._has_all(self._turns(of, temperature, best)) for of in self.prompts):
                return False
        return True

    def check(self) -> None:
        """See that everything can be measured: every engine decodes a bit at every temperature.

        Raises:
            FalconLabError: prompts, a head with some budget, or the way to sample cannot be used.
        """
        plan = self.plan
        named = [budget for budget in plan.budgets if budget.word != BEST]
        grid = plan.grid if plan.wants_best else []
        if plan.wants_best:
            self._other_prompts()
        self._try({PLAIN: self._plain})
        for one in self.drafters:
            chosen = grid if one.seed == one.head.seeds[0] else []
            for budget in dict.fromkeys([*named, *chosen]):
                self.facts[one.key(budget)] = facts_of(self._engine(one, budget), budget)
            if chosen:
                fits = {budget.word for budget in grid if self.facts[one.key(budget)].fits}
                refuse_unfit(one.head, fits, grid)

    def own_facts(self, one: TrainedDrafter) -> EngineFacts:
        """Return what is known of a drafter at a budget for which it has no other one."""
        budgets = [*self.plan.budgets, *self.plan.grid]
        own = [budget for budget in budgets if budget.word not in one.others]
        known = [self.facts[one.key(b)] for b in own if one.key(b) in self.facts]
        if known:
            return known[0]
        budget = own[0] if own else NodeBudget(OWN)
        return facts_of(self._engine(one, budget), budget)

    def _has_all(self, turns: Turns) -> bool:
        """Return whether all answers of a measurement are there, and what tables say beside."""
        journal = self._journal(turns)
        known = journal.facts()
        if any(
            fitting(known.get(one.key(b).name), EngineFacts) is None for one, b in turns.engines
        ):
            return False
        self._know(turns)
        return self._is_answered(turns)

    def _is_answered(self, turns: Turns) -> bool:
        names = [*self._in_turns({key: key.name for key in self._fitting(turns)}, "")]
        return is_finished(self._journal(turns), names, turns.prompts, turns.config.repeats)

    def _know(self, turns: Turns) -> None:
        """Take the facts of a measurement's engines from its journal, or from themselves."""
        journal = self._journal(turns)
        known = journal.facts()
        for one, budget in turns.engines:
            key = one.key(budget)
            found = fitting(known.get(key.name), EngineFacts)
            if found is None:
                found = facts_of(self._engine(one, budget), budget)
                journal.add_facts(key.name, asdict(found))
            self.facts[key] = found

    def _fitting(self, turns: Turns) -> dict[EngineKey, tuple[TrainedDrafter, NodeBudget]]:
        """Return the engines of a measurement that keep to their budgets, once facts are known."""
        made_of = {one.key(budget): (one, budget) for one, budget in turns.engines}
        return {key: of for key, of in made_of.items() if self.facts[key].fits}

    # --- engines ------------------------------------------------------------------------------

    @cached_property
    def _plain(self) -> PlainEngine:
        return self.setup.plain()

    def _engine(self, one: TrainedDrafter, budget: NodeBudget) -> SpeculativeEngine:
        """Return an engine, which is made and tried when it is first asked for."""
        key = one.key(budget)
        if key not in self._engines:
            engine = self._engines[key] = one.engine(budget, self.setup)
            if facts_of(engine, budget).fits:
                self._try({key.name: engine})
        return self._engines[key]

    def _try(self, engines: Mapping[str, Engine]) -> None:
        prompts = next(iter(self.prompts.values()))
        self.setup.rehearse(engines, prompts, self.plan.config.temperatures)

    # --- measurements -------------------------------------------------------------------------

    def _turns(self, prompt_set: str, temperature: float, best: Mapping[str, NodeBudget]) -> Turns:
        """Return the measurement of a prompt set at a temperature."""
        config = self.plan.evaluation(prompt_set, temperature)
        budgets = {head.name: self._budgets(best.get(head.name)) for head in self.plan.heads}
        return Turns("compare", self.drafters, budgets, config, self.prompts[prompt_set])

    def _grid_turns(self, temperature: float) -> Turns:
        """Return the measurement that budgets are chosen by at a temperature."""
        config = replace(self.plan.base.evaluation, temperature=temperature, methods={}, repeats=1)
        first = [d for d in self.drafters if d.seed == d.head.seeds[0]]
        budgets: Budgets = {head.name: self.plan.grid for head in self.plan.heads}
        return Turns("tune", first, budgets, config, self._other_prompts())

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
        turns, grid = self._grid_turns(temperature), self.plan.grid
        self._know(turns)
        if not self._is_answered(turns):
            self.setup.announce(
                f"temperature {temperature:g}: choosing the best of {len(grid)} budgets for "
                f"every head on {len(turns.prompts)} other prompts"
            )
        found = self._measure(turns)
        words, best, tried = {budget.word: budget for budget in grid}, {}, {}
        for head in self.plan.heads:
            keys = [key for key in self._fitting(turns) if key.head == head.name]
            refuse_unfit(head, {key.budget for key in keys}, grid)
            records = {key.budget: found.records[key.name] for key in keys}
            best[head.name] = words[fastest_method(records)]
            tried[head.name] = {word: tokens_per_second(of) for word, of in records.items()}
        return best, tried

    def _measure(self, turns: Turns) -> Measurement:
        """Measure what is left, with engines that are warmed up once, and return all of it."""
        journal, keys = self._journal(turns), self._fitting(turns)
        engines: dict[EngineKey, Engine]
        if self._is_answered(turns):
            plain: Engine = Answered(lossless=True)
            engines = {key: Answered(self.facts[key].lossless) for key in keys}
        else:
            plain = self._plain
            engines = {key: self._engine(*made_of) for key, made_of in keys.items()}
        taking = self._in_turns(engines, plain)
        again = baselines(self.plan)[1:]  # the same engine, which is warm after its first turn
        found = self.setup.measure(
            taking,
            turns.prompts,
            turns.config,
            journal=journal,
            warm={*self._warm, *again},
        )
        self._warm.update(name for name, each in taking.items() if not isinstance(each, Answered))
        return found

    def _in_turns(self, engines: Mapping[EngineKey, E], plain: E) -> dict[str, E]:
        """Return engines in their order, plain decoding before those of every head."""
        found = dict[str, E]()
        turns = dict(zip(baseline_places(len(self.plan.heads)), baselines(self.plan), strict=True))
        for place, head in enumerate(self.plan.heads):
            if place in turns:
                found[turns[place]] = plain
            found |= {key.name: e for key, e in engines.items() if key.head == head.name}
        return found

    def _journal(self, turns: Turns) -> Journal:
        """Return the journal of a measurement, opened once."""
        facts = {"engines": described(turns.drafters, turns.budgets)}
        names = (turns.kind, repr(turns.config), *facts["engines"])
        if names not in self._journals:
            self._journals[names] = self.setup.journal(
                self.plan.folder, turns.kind, turns.prompts, facts, turns.config
            )
        return self._journals[names]

    def _peaks(self, turns: Turns) -> dict[EngineKey, int | None]:
        """Measure the memory of one more answer of each engine with the first seed's drafter."""
        first = {head.name: head.seeds[0] for head in self.plan.heads}
        journal, config, found = self._journal(turns), turns.config, {}
        with torch_threads(config.threads):
            for key, made_of in self._fitting(turns).items():
                if key.seed != first[key.head]:
                    continue
                if key.name not in journal.peaks():
                    engine = self._engine(*made_of)
                    answer = partial(self.setup.answer, engine, turns.prompts[0], config=config)
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
