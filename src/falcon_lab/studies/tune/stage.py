"""Tune a tree for an experiment's drafter and this machine, and measure it beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from falcon_lab.config.schema import PLAIN, Experiment
from falcon_lab.decoding.assembling import assemble
from falcon_lab.interfaces import TreeBuilder
from falcon_lab.measure.engines import Methods, Setup
from falcon_lab.measure.measurement import Measurement
from falcon_lab.measure.records import tokens_per_second
from falcon_lab.measure.statistics import compare, fastest_method
from falcon_lab.plugins.builtins import DynamicTreeConfig
from falcon_lab.plugins.discovery import load_components
from falcon_lab.studies.tune.choosing import (
    DYNAMIC,
    TUNED,
    Choice,
    Chosen,
    Growth,
    add_own,
    add_row,
    best_growth,
    choose,
    finalists,
)
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.measuring import Bench, choose_threads, measure_costs
from falcon_lab.studies.tune.replay import Estimate, estimate, table
from falcon_lab.studies.tune.texts import Text, write_texts
from falcon_lab.timing import torch_threads
from falcon_lab.trees.paths import path_name
from falcon_lab.trees.templates import named

if TYPE_CHECKING:
    from falcon_lab.plugins.registry import Components

RANKS = 8
"""Ranks of the acceptance tables that have a column of their own."""
GROWN_ON = 8
"""Texts that dynamic trees are replayed on while their limits are sought."""
PRICED_ON = 12
"""Texts that costs are measured on."""
REPLAYED_ON = 24
"""Texts that the methods are replayed on."""
TRIED_ON = 12
"""Prompts of the tuning set that the finalists answer, to choose one of them."""


@dataclass(frozen=True)
class Limits:
    """What is tuned within.

    Attributes:
        texts: prompts that the target answers to be tuned on.
        source: the set that they are of, as ``evaluation.prompts.name``.
        nodes: most draft tokens of a tree.
        depth: longest path.
    """

    texts: int = 48
    source: str = "validation"
    nodes: int = 64
    depth: int = 12


def tune(experiment: Experiment, limits: Limits, announce: Callable[[str], None]) -> dict[str, Any]:
    """Tune a tree for the drafter of the experiment's methods, and measure it beside them.

    Args:
        experiment: target, prompts of the measurement, and at least one method with the drafter.
        limits: what is tuned on, and within.
        announce: is called with one line for the user at a time.

    Returns:
        What ``results.json`` holds, and ``tune``; see ``benchmarks/README.md``.

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    components = load_components()
    setup = Setup.load(experiment, components, announce, partial(check_tuning, limits=limits))
    prompts = setup.prompts()
    others = setup.other_prompts(limits.source, limits.texts, prompts)
    add_own(experiment)
    methods = setup.methods()  # a wrong one is refused now
    methods.leave_out_others()
    bench = bench_of(setup)
    if experiment.evaluation.threads is None and setup.target.device.type == "cpu":
        experiment.evaluation.threads = choose_threads(bench.target, announce)
    with torch_threads(experiment.evaluation.threads):
        header = setup.header()
        announce(f"the target answers {len(others)} prompts of {limits.source}")
        texts = write_texts(
            bench.target,
            [prompt.tokens([]) for prompt in others],
            experiment.evaluation.max_new_tokens,
            bench.stop,
            experiment.decoding,
        )
        announce("measuring what rounds of many shapes cost")
        growing = {"dynamic": _dynamic(setup.components, bench, limits)}
        costs = measure_costs(bench, texts[:PRICED_ON], limits.nodes, growing)
        announce("looking where the drafter is right")
        chosen, growth = _choose(bench, texts, costs, limits, announce)
        for name in _add_tuned(experiment, setup.components, chosen.choice, growth):
            setup.add(methods, name, experiment.evaluation.methods[name])
        estimates = estimates_of(experiment, methods, texts[:REPLAYED_ON], costs)
        announce("measuring the most promising trees on prompts that were tuned on")
        names = finalists(estimates)
        trial = setup.measure({n: methods.engines[n] for n in names}, others[:TRIED_ON])
        best = fastest_method(trial.records, unless_clearly=TUNED)
        announce("measuring all trees in turns on the other prompts")
        measurement = setup.measure({PLAIN: setup.plain(), **methods.engines}, prompts)
    row = experiment.evaluation.methods[best]
    results = setup.results(measurement, methods, header, headline=best)
    results["tune"] = {
        "limits": asdict(limits),
        "block": bench.drafter.block,
        "costs": asdict(costs),
        **_found(chosen, texts),
        "trial": {name: tokens_per_second(of) for name, of in trial.records.items()},
        "chosen": best,
        "tree": row.tree or experiment.tree,
        "controller": row.controller or experiment.controller,
        "predicted": {name: found.as_dict() for name, found in estimates.items()},
        "over": _over(measurement, best),
    }
    return results


def check_tuning(setup: Setup, limits: Limits) -> None:
    """See that everything can be measured and tuned on.

    Raises:
        FalconLabError: as ``Setup.check``, or the prompts to tune on cannot be used.
    """
    setup.check()
    setup.other_prompts(limits.source, limits.texts, setup.prompts())


def bench_of(setup: Setup) -> Bench:
    """Return what the drafter of the first method is measured with."""
    experiment = setup.experiment
    method = next(iter(experiment.evaluation.methods.values()))
    drafter, _ = setup.drafter(method)
    parts = {
        "tree": experiment.tree,
        "acceptance": method.acceptance or experiment.acceptance,
        "controller": {"name": "fixed"},
    }
    made = assemble(setup.target, drafter, parts, setup.components, decoding=experiment.decoding)
    return Bench(made, setup.stop)


def _dynamic(components: Components, bench: Bench, limits: Limits) -> TreeBuilder:
    options = DynamicTreeConfig(nodes=min(10, limits.nodes), beam=2, depth=limits.depth)
    node = components.check("tree_builder", {"name": "dynamic", **asdict(options)}, "tree")
    builder: TreeBuilder = components.build("tree_builder", node, bench.context)
    return builder


def _choose(
    bench: Bench,
    texts: Sequence[Text],
    costs: Costs,
    limits: Limits,
    announce: Callable[[str], None],
) -> tuple[Chosen, Growth]:
    block = bench.drafter.block
    chosen = choose(
        texts,
        bench.drafter,
        costs,
        named("auto", block),
        nodes=limits.nodes,
        depth=limits.depth,
        announce=announce,
    )
    announce("replaying trees that follow the drafter")
    growth = best_growth(bench, texts[:GROWN_ON], costs, nodes=limits.nodes, depth=limits.depth)
    return chosen, growth


def _add_tuned(
    experiment: Experiment, components: Components, choice: Choice, growth: Growth
) -> tuple[str, ...]:
    """Return methods for what was found, their nodes complete, and the methods' names."""
    template = [path_name(path) for path in choice.paths]
    for name, tree, threshold in (
        (TUNED, {"name": "static", "template": template}, choice.threshold),
        (DYNAMIC, {"name": "dynamic", **asdict(growth.tree)}, growth.threshold),
    ):
        controller: dict[str, Any] = {"name": "fixed"}
        if threshold is not None:
            controller = {"name": "confidence", "threshold": threshold}
        add_row(
            experiment,
            name,
            components.check("tree_builder", tree, "tree"),
            components.check("controller", controller, "controller"),
        )
    return TUNED, DYNAMIC


def estimates_of(
    experiment: Experiment, methods: Methods, texts: Sequence[Text], costs: Costs
) -> dict[str, Estimate]:
    """Estimate every method. A builder without a price of its own counts as a template.

    A drafter with auxiliary nodes learns from the target's passes, of which a replay has none: it
    has no estimate, and is measured alone.
    """
    found = {}
    for name, engine in methods.engines.items():
        if engine.drafter.max_auxiliary:
            continue
        row = experiment.evaluation.methods[name]
        tree, controller = row.tree or experiment.tree, row.controller or experiment.controller
        builder = "dynamic" if tree["name"] == "optimal" else tree["name"]  # grown the same way
        found[name] = estimate(
            engine, texts, costs, builder=builder, asked=controller["name"] != "fixed"
        )
    return found


def _found(chosen: Chosen, texts: Sequence[Text]) -> dict[str, Any]:
    """Return the tables, and the best tree for every threshold."""
    return {
        "texts": {"count": len(texts), "tokens": sum(text.answer for text in texts)},
        "rounds": len(chosen.traces),
        "acceptance": {
            "any": [asdict(row) for row in table(chosen.traces, RANKS)],
            "first": [asdict(row) for row in table(chosen.traces, RANKS, first=True)],
        },
        "thresholds": [
            {
                "threshold": choice.threshold,
                "tokens": choice.candidate.tokens,
                "milliseconds": 1000 * choice.candidate.seconds,
                "rate": choice.candidate.rate,
                "template": [path_name(path) for path in choice.paths],
            }
            for choice in chosen.by_threshold
        ],
    }


def _over(measurement: Measurement, best: str) -> dict[str, Any]:
    """Return how much faster the chosen tree is than every other method, prompt by prompt."""
    own = measurement.records[best]
    return {
        name: asdict(compare(own, rows).speedup)
        for name, rows in measurement.records.items()
        if name != best
    }
