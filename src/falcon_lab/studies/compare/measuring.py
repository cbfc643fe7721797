"""Equal budgets: what a word such as ``tree-32`` stands for. Imports no torch.

A budget limits what the target verifies in a round. How a head fills it is its own affair, so a
tree goes where the head is surest, by one rule for all of them: EAGLE-2's (``trees/dynamic.py``)
with N nodes, paths of up to ``DEPTH``, and a beam and width of √N, which lies between this
repository's default (16 nodes, 4) and EAGLE-2's own (60 nodes, 10). A tree drawn by hand would
favour the head that it was drawn for, and ``optimal`` has no beam, so that a head with k = 1 would
pay for N blocks a pass. Depth counts tokens, not passes: a head with a larger k reaches it in fewer
passes, which is what it was built for; the head's controller may stop before.

What every drafter answered, kept line by line, so that a killed comparison goes on.

The file is named by all that decides what is measured: the same comparison finds its rows again,
and so does another one of the same folder that measures just the same, for another table.

Every drafter with every budget answers every prompt: one process, in turns, one temperature.

Plain decoding is the yardstick of all of them, and answers a prompt as often as there are heads,
spread evenly among them: its median there is what the others' times are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.schema import EvaluationConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.measure import provenance
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import next_logits, other_prompts, stop_of
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.measurement import PLAIN, Engine, Measurement, measure
from falcon_lab.measure.records import Record
from falcon_lab.sampling import Sampling
from falcon_lab.studies.bench.memory import peak_of
from falcon_lab.studies.compare.budgets import BEST, NodeBudget
from falcon_lab.studies.compare.contestants import Budgets, Cell, Contestant, engines_of, made_of
from falcon_lab.studies.compare.plan import Plan
from falcon_lab.timing import torch_threads

if TYPE_CHECKING:
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components


@dataclass(frozen=True)
class Measured:
    """One temperature.

    Attributes:
        temperature: 0 is greedy.
        plain: the yardstick's rows.
        rows: engine -> its rows, prompts in the order of ``plain``.
        lossless: engine -> what its rule promises.
        best: head -> the budget that ``best`` is; empty when nobody asked.
        tried: head -> budget of the grid -> tokens a second on the prompts that it was chosen on.
        peaks: engine -> bytes at its highest point, for the first seed.
        journal: where the rows are.
    """

    temperature: float
    plain: list[Record]
    rows: dict[Cell, list[Record]]
    lossless: dict[Cell, bool]
    best: dict[str, NodeBudget]
    tried: dict[str, dict[str, float]]
    peaks: dict[Cell, int | None]
    journal: str


@dataclass(frozen=True)
class Arena:
    """Where the drafters meet.

    Attributes:
        plan: of the comparison.
        target: on its device.
        components: the registry.
        contestants: all drafters.
        prompts: of the measurement.
        announce: takes one line for the user.
    """

    plan: Plan
    target: Target
    components: Components
    contestants: list[Contestant]
    prompts: list[EncodedPrompt]
    announce: Callable[[str], None]

    def measure_at(self, temperature: float) -> Measured:
        """Everything at one temperature, ``best`` chosen before where it is asked for."""
        best, tried = self._choose(temperature) if self.plan.wants_best else ({}, {})
        budgets = {head.name: self._budgets(best.get(head.name)) for head in self.plan.heads}
        config = self._config(temperature)
        engines = engines_of(self.contestants, budgets, self.plan, self.target, self.components)
        self.announce(f"temperature {temperature:g}: {len(engines)} engines in turns")
        found, journal = self._measure("compare", engines, self.contestants, budgets, config)
        peaks = self._peaks(engines, journal, config)
        cells = {cell: at for cell, at in self._cells(best).items() if at in engines}
        return Measured(
            temperature,
            merged([found.records[name] for name in yardsticks(self.plan)]),
            {cell: found.records[engine.name] for cell, engine in cells.items()},
            {cell: found.lossless[engine.name] for cell, engine in cells.items()},
            best,
            tried,
            {cell: peaks[engine] for cell, engine in cells.items() if engine in peaks},
            str(journal.path),
        )

    def _budgets(self, best: NodeBudget | None) -> list[NodeBudget]:
        """Budgets of a head, its best one among them if it is no other already."""
        found = [best if budget.word == BEST else budget for budget in self.plan.budgets]
        return list(dict.fromkeys(budget for budget in found if budget is not None))

    def _cells(self, best: Mapping[str, NodeBudget]) -> dict[Cell, Cell]:
        """What the tables list -> the engine that was measured: ``best`` is one of the others."""
        return {
            Cell(c.head.name, budget.word, c.seed): c.cell(
                best[c.head.name] if budget.word == BEST else budget
            )
            for c in self.contestants
            for budget in self.plan.budgets
        }

    def _choose(
        self, temperature: float
    ) -> tuple[dict[str, NodeBudget], dict[str, dict[str, float]]]:
        """The grid's fastest budget of every head, on prompts that are not measured on."""
        tuning = self.plan.config.tuning
        prompts = other_prompts(
            self.plan.base, self.target, tuning.source, tuning.prompts, self.prompts
        )
        first = [c for c in self.contestants if c.seed == c.head.seeds[0]]
        grid = self.plan.grid
        budgets = {head.name: grid for head in self.plan.heads}
        config = replace(self._config(temperature), repeats=1)
        engines = engines_of(first, budgets, self.plan, self.target, self.components)
        self.announce(
            f"temperature {temperature:g}: choosing the best of {len(grid)} budgets for every head "
            f"on {len(prompts)} other prompts"
        )
        found, _ = self._measure("tune", engines, first, budgets, config, prompts)
        tried: dict[str, dict[str, float]] = {head.name: {} for head in self.plan.heads}
        for cell in engines:
            tried[cell.head][cell.budget] = rate(found.records[cell.name])
        words = {budget.word: budget for budget in grid}
        if nothing := [head for head, rates in tried.items() if not rates]:
            raise FalconLabError(
                f"{nothing[0]} fits no budget of tuning.grid; add own, or say how it spends one in "
                f"heads.{nothing[0]}.spend"
            )
        best = {head: words[max(rates, key=lambda w: rates[w])] for head, rates in tried.items()}
        return best, tried

    def _measure(
        self,
        kind: str,
        engines: Mapping[Cell, SpeculativeEngine],
        contestants: Sequence[Contestant],
        budgets: Budgets,
        config: EvaluationConfig,
        prompts: Sequence[EncodedPrompt] | None = None,
    ) -> tuple[Measurement, Journal]:
        prompts = self.prompts if prompts is None else prompts
        facts = self._facts(config, prompts) | {"engines": made_of(contestants, budgets)}
        journal = Journal.open(self.plan.folder, kind, facts)
        if journal:
            self.announce(f"{len(journal)} answers are there from before: {journal.path}")
        found = measure(
            self._in_turns(engines),
            prompts,
            config,
            stop=stop_of(self.plan.base, self.target),
            logits=next_logits(self.target),
            journal=journal,
        )
        return found, journal

    def _in_turns(self, engines: Mapping[Cell, SpeculativeEngine]) -> dict[str, Engine]:
        """The engines in their order, a yardstick before those of every head."""
        plain = PlainEngine(self.target, decoding=self.plan.base.decoding)
        turns: dict[str, Engine] = {}
        for yardstick, head in zip(yardsticks(self.plan), self.plan.heads, strict=True):
            turns[yardstick] = plain
            turns |= {cell.name: e for cell, e in engines.items() if cell.head == head.name}
        return turns

    def _config(self, temperature: float) -> EvaluationConfig:
        return replace(self.plan.base.evaluation, temperature=temperature, methods={})

    def _facts(self, config: EvaluationConfig, prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
        """What decides a measurement beside its engines."""
        base, target = self.plan.base, self.target
        hardware = provenance.hardware(device=str(target.device), threads=config.threads)
        versions = provenance.versions()
        return {
            "target": provenance.target_of(target),
            "decoding": [asdict(base.decoding), base.target.attention, base.target.lean],
            "evaluation": asdict(config),
            "prompts": [list(prompt.turns) for prompt in prompts],
            "hardware": {key: hardware[key] for key in ("cpu", "gpu", "threads", "device")},
            "versions": {key: versions[key] for key in ("falcon-lab", "torch", "transformers")},
        }

    def _peaks(
        self,
        engines: Mapping[Cell, SpeculativeEngine],
        journal: Journal,
        config: EvaluationConfig,
    ) -> dict[Cell, int | None]:
        """Memory of one more answer of each engine with the first seed's drafter."""
        known = journal.peaks()
        first = {head.name: head.seeds[0] for head in self.plan.heads}
        found = {}
        with torch_threads(config.threads):
            for cell, engine in engines.items():
                if cell.seed != first[cell.head]:
                    continue
                if cell.name not in known:
                    peak = peak_of(partial(self._answer, engine, config), self.target.device)
                    journal.add_peak(cell.name, None if peak is None else peak.growth)
                found[cell] = journal.peaks()[cell.name]
        return found

    def _answer(self, engine: SpeculativeEngine, config: EvaluationConfig) -> object:
        return engine.generate(
            self.prompts[0].tokens([]),
            max_new_tokens=config.max_new_tokens,
            sampling=Sampling(config.temperature, config.top_k, config.top_p),
            generator=torch.Generator(self.target.device).manual_seed(config.seed),
            stop=stop_of(self.plan.base, self.target),
        )


def yardsticks(plan: Plan) -> list[str]:
    """Names of plain decoding's turns: one a head."""
    return [PLAIN, *(f"{PLAIN} {turn}" for turn in range(2, len(plan.heads) + 1))]


def merged(turns: Sequence[Sequence[Record]]) -> list[Record]:
    """Plain decoding's rows: of every prompt the turn whose wall time is the median."""
    rows = []
    for of_prompt in zip(*turns, strict=True):
        walls = [row.times.wall for row in of_prompt]
        middle = of_prompt[walls.index(median_low(walls))]
        rows.append(replace(middle, method=PLAIN, identical=None, wall_repeats=walls))
    return rows


def rate(rows: Sequence[Record]) -> float:
    """New tokens a second, prompts together."""
    return sum(len(row.tokens) for row in rows) / sum(row.times.wall for row in rows)
