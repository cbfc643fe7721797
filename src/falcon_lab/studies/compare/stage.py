"""Run a comparison from its plan to its results: train what is missing, measure, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import random

from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import Experiment
from falcon_lab.decoding.assembling import KINDS
from falcon_lab.files import check_place, locked, make_folder, remove_leftovers
from falcon_lab.measure import provenance
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import Setup
from falcon_lab.measure.prompts import check_prompts
from falcon_lab.measure.statistics import Interval, resampled
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.target import TargetAhead, stored_quality, target_ahead
from falcon_lab.run import keep_to_one_device
from falcon_lab.studies.compare import figures
from falcon_lab.studies.compare.drafters import (
    TrainedDrafter,
    drafters_of,
    same_target,
    train_heads,
    training_facts,
)
from falcon_lab.studies.compare.measuring import Comparison, Measured, baselines
from falcon_lab.studies.compare.paper import compare_with_published
from falcon_lab.studies.compare.plan import BEST, NodeBudget, Plan

SCHEMA_VERSION = 2

PUBLISHED = {
    "tau": figures.tau,
    "tau_draft": figures.tau_draft,
    "alpha": lambda table: 100 * figures.alpha(table),
}
"""Metric -> its value as papers print it."""


class OfHead(Protocol):
    """Runs or checks the experiment of one head and seed, of which the target is known."""

    def __call__(self, experiment: Experiment, *, ahead: TargetAhead) -> object:
        """Do it."""
        ...


def compare(
    plan: Plan, announce: Callable[[str], None], train: OfHead, check: OfHead
) -> dict[str, Any]:
    """Run a comparison, from wherever an earlier one stopped.

    Args:
        plan: of the comparison.
        announce: is called with one line for the user at a time.
        train: runs the experiment of one head and seed.
        check: sees that such an experiment can be run, before the first one is.

    Returns:
        The content of its results file; see ``docs/comparison-schema.md``.

    Raises:
        FalconLabError: for whatever the user can mend; what was finished stays finished.
    """
    components = load_components()
    ahead = check_comparison(plan, components, announce, check)
    compared = None
    if not (plan.pending or ahead.stands_in):
        compared = assembled(plan, ahead, components, announce)
        if not compared.is_finished:
            compared.check()
    with holding(plan.folder):
        train_heads(plan, announce, partial(train, ahead=ahead))
        compared = compared or assembled(plan, ahead, components, announce)
        quality = stored_quality(plan.base.target, components)
        header = compared.setup.header()
        measured = list(compared.measure())
    return {
        "schema": SCHEMA_VERSION,
        "name": plan.base.name,
        **header,
        "experiment": to_plain(plan.base),
        "comparison": asdict(plan.config),
        "target": provenance.target_of(compared.setup.target, quality),
        "protocol": protocol_of(compared, measured),
        "left_out": dict(plan.left_out) | unfit(plan, measured),
        "heads": heads_of(compared, measured),
        "plain": [figures.plain(found) for found in measured],
        "rows": [row for found in measured for row in figures.rows(found)],
        "pairs": [pair for found in measured for pair in figures.pairs(found)],
        "paper": paper_of(plan, measured),
    }


def check_comparison(
    plan: Plan, components: Components, announce: Callable[[str], None], check: OfHead
) -> TargetAhead:
    """See that every head can be trained and measured, without doing it; nothing is written.

    Heads that are all trained are tried as they are measured, and only where some answer is left.

    Returns:
        The target, or a stand-in for one that is yet to be trained.

    Raises:
        FalconLabError: what some training or the measurement would refuse.
    """
    same_target(plan)
    check_place(plan.folder / f"{plan.base.name}.json", folder=False)
    for prompts in plan.prompt_sets.values():
        check_prompts(prompts)
    ahead = target_ahead(plan.base.target, announce, components)
    for head, seed in plan.pending:
        keep_to_one_device(head.experiments[seed])
        check(head.experiments[seed], ahead=ahead)
    if not (plan.pending or ahead.stands_in):
        return ahead
    setup = Setup.ahead(plan.base, ahead, components)
    with random.fork_rng(devices=[]):
        first = replace(plan, heads=[head.first for head in plan.heads])
        drafters = drafters_of(first, setup, fresh=True)
        Comparison(first, setup, drafters, prompts_of(plan, setup)).check()
    return ahead


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder against other comparisons.

    Raises:
        FalconLabError: one is at work there.
    """
    busy = (
        f"{folder}: another comparison is using this folder; wait for it or choose another with "
        "out=FOLDER"
    )
    with locked(make_folder(folder) / ".compare.lock", busy=busy):
        remove_leftovers(folder)
        yield


def assembled(
    plan: Plan, ahead: TargetAhead, components: Components, announce: Callable[[str], None]
) -> Comparison:
    """Load target and prompts; drafters are loaded where they have something to answer."""
    target = ahead.itself(plan.base.target, announce, components)
    setup = Setup.of(plan.base, target, components, announce)
    return Comparison(plan, setup, drafters_of(plan, setup), prompts_of(plan, setup))


def prompts_of(plan: Plan, setup: Setup) -> dict[str, list[EncodedPrompt]]:
    """Return every prompt set by its name, ready to be decoded."""
    return {name: setup.prompts(config) for name, config in plan.prompt_sets.items()}


def protocol_of(compared: Comparison, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return how it was measured."""
    evaluation = compared.plan.base.evaluation
    return {
        "prompts": {name: len(prompts) for name, prompts in compared.prompts.items()},
        "repeats": evaluation.repeats,
        "warmup": evaluation.warmup,
        "baselines": len(baselines(compared.plan)),
        "rows": {
            name: {f"{m.temperature:g}": m.journal for m in measured if m.prompt_set == name}
            for name in compared.prompts
        },
    }


def unfit(plan: Plan, measured: Sequence[Measured]) -> dict[str, str]:
    """Return head and budget -> why the head is not measured there."""
    taken = {(key.head, key.budget) for found in measured for key in found.records}
    return {
        f"{head.name} {budget.word}": "a round of it may verify more nodes; heads."
        f"{head.name}.spend can say how it spends this budget"
        for head in plan.heads
        for budget in plan.budgets
        if (head.name, budget.word) not in taken
    }


def heads_of(compared: Comparison, measured: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Return what every head is, what its trainings took, and which budget is its best."""
    return {
        head.name: _head([d for d in compared.drafters if d.head is head], compared, measured)
        for head in compared.plan.heads
    }


def _head(
    drafters: Sequence[TrainedDrafter], compared: Comparison, measured: Sequence[Measured]
) -> dict[str, Any]:
    first = drafters[0]
    name = first.head.name

    def label(budget: NodeBudget) -> str:
        return first.label(budget, compared.facts[first.key(budget)].block)

    own = {key: getattr(first.head.experiment, key) for key in KINDS}
    facts = compared.own_facts(first)
    return {
        "drafter": first.node,
        "block": facts.block,
        "parameters": facts.parameters,
        "trainings": [training_facts(first.head, d.seed) for d in drafters]
        if first.head.trains
        else [],
        "components": compared.setup.provenance(first.node, own, compiled=facts.compiled),
        "budgets": {b.word: label(b) for b in compared.plan.budgets if b.word != BEST},
        "best": {
            f"{found.temperature:g}": {
                "budget": found.best[name].word,
                "label": label(found.best[name]),
                "tokens_per_second": found.tried[name],
            }
            for found in measured
            if name in found.best
        },
    }


def paper_of(plan: Plan, measured: Sequence[Measured]) -> dict[str, Any] | None:
    """Return the paper's figures beside ours, where the comparison has some."""
    paper = plan.config.paper
    if paper is None:
        return None
    found = next(m for m in measured if m.temperature == paper.temperature)
    of, plain = figures.tables(found), figures.sums([found.plain])

    def ours(metric: str, head: str, budget: str) -> Mapping[str, Any] | None:
        table = of.get((head, budget))
        if table is None:
            return None
        if metric == "speedup":
            return asdict(resampled(figures.faster, table, plain))
        return asdict(resampled(PUBLISHED[metric], table))

    def ratio(metric: str, first: tuple[str, str], second: tuple[str, str]) -> Interval | None:
        if first not in of or second not in of:
            return None
        return resampled(figures.RATIOS[metric], of[first], of[second])

    return compare_with_published(paper, ours, ratio)
