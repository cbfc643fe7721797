"""Choose a static tree and when to stop drafting: trace rounds, search, trace again.

Which rounds there are depends on the tree: they start behind what it accepted. So the search is
repeated on the rounds of the tree that the last search found, together with those before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from falcon_lab.config.schema import Experiment, MethodConfig
from falcon_lab.controllers import Confidence, Fixed
from falcon_lab.interfaces import Drafter, LengthController
from falcon_lab.plugins.builtins import ConfidenceConfig, DynamicTreeConfig, FixedConfig
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.measuring import Bench
from falcon_lab.studies.tune.replay import (
    DraftingPolicy,
    Estimate,
    TracedRound,
    estimate,
    odds,
    trace,
)
from falcon_lab.studies.tune.search import Candidate, best_tree
from falcon_lab.studies.tune.texts import Text
from falcon_lab.trees.best_first import DynamicTree
from falcon_lab.trees.paths import Path

TUNED, DYNAMIC, OWN = "tuned", "tuned dynamic", "own"

TEMPLATES = {2: ("llama", "vicuna"), 3: ("k3",), 4: ("k4",)}
"""k -> large templates that were drawn for it."""


def shipped_trees(block: int) -> list[str]:
    """Return trees as ``--tree`` has them: chains, templates for k, and those of the drafter.

    Args:
        block: k.
    """
    chains = [f"chain,depth={depth}" for depth in (4, 6, 8)]
    names = ["auto", f"k{block}-8", f"k{block}-10-d8", *TEMPLATES.get(block, ())]
    templates = [f"static,template={name}" for name in names]
    return [*chains, *templates, "dynamic", "optimal"]


def add_own(experiment: Experiment) -> None:
    """Add a method for the experiment's own tree, unless another one has it already."""
    own = (experiment.tree, experiment.controller)
    rows = experiment.evaluation.methods.values()
    if all((row.tree, row.controller or experiment.controller) != own for row in rows):
        first = next(iter(rows))
        experiment.evaluation.methods[OWN] = MethodConfig(
            drafter=first.drafter, drafter_path=first.drafter_path, tree=experiment.tree
        )


def add_row(experiment: Experiment, name: str, tree: dict[str, Any], controller: Any) -> None:
    """Add a method of the same drafter with a tree and a controller; their nodes are complete."""
    first = next(iter(experiment.evaluation.methods.values()))
    experiment.evaluation.methods[name] = MethodConfig(
        drafter=first.drafter, drafter_path=first.drafter_path, tree=tree, controller=controller
    )


FINALISTS = 5
"""Methods with the best estimates that really decode; the tuned ones are always among them."""


def finalists(estimates: Mapping[str, Estimate]) -> list[str]:
    """Return the methods with the best estimates, the tuned trees among them: costs are a model."""
    order = sorted(estimates, key=lambda name: -estimates[name].rate)
    others = [name for name in order if name not in (TUNED, DYNAMIC)]
    return [TUNED, DYNAMIC, *others[: FINALISTS - 2]]


THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the ``confidence`` controller."""
ROUNDS = 4
"""Searches at the most."""


@dataclass(frozen=True)
class Choice:
    """Holds a tree, a rule of stopping, and their estimate on the rounds that were traced.

    Attributes:
        candidate: the tree.
        threshold: of the ``confidence`` controller; None is ``fixed``.
    """

    candidate: Candidate
    threshold: float | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the tree's nodes, each as its path of ranks."""
        return self.candidate.paths


def logarithm(threshold: float | None) -> float:
    """Return the logarithm of a threshold; no threshold is never reached."""
    return -math.inf if threshold is None else math.log(threshold)


def search(
    traces: Sequence[TracedRound], costs: Costs, block: int, *, nodes: int, depth: int
) -> tuple[Choice, list[Choice]]:
    """Find the best tree over all numbers of passes and all thresholds, and each threshold's best.

    Args:
        traces: rounds.
        costs: of this machine.
        block: k.
        nodes: most draft tokens.
        depth: longest path; whole passes of it count.
    """
    found = []
    for threshold in (None, *THRESHOLDS):
        asking, best = threshold is not None, None
        for passes in range(1, max(depth // block, 1) + 1):
            chances = odds(traces, block, passes, logarithm(threshold))
            floor = best.rate if best else 0.0
            tree = best_tree(chances, costs, block, nodes, asking=asking, floor=floor)
            best = tree if best is None or tree.rate > best.rate else best
        assert best is not None
        found.append(Choice(best, threshold))
    return max(found, key=lambda choice: choice.candidate.rate), found


@dataclass(frozen=True)
class Chosen:
    """Holds what was chosen, and from what.

    Attributes:
        choice: the best.
        by_threshold: the best for every threshold, without one first.
        traces: all rounds that were traced.
        own: those of the last pass over the texts: the rounds of the tree before the last search.
    """

    choice: Choice
    by_threshold: list[Choice]
    traces: list[TracedRound]
    own: list[TracedRound]


def choose(
    texts: Sequence[Text],
    drafter: Drafter,
    costs: Costs,
    start: Sequence[Path],
    *,
    nodes: int,
    depth: int,
    announce: Callable[[str], None],
) -> Chosen:
    """Search until the tree leads to itself.

    Args:
        texts: the target's own.
        drafter: with block k.
        costs: of this machine.
        start: a tree to begin with.
        nodes: most draft tokens.
        depth: longest path.
        announce: is called with one line for the user at a time.
    """
    take = partial(trace, drafter=drafter, depth=depth, lowest=logarithm(THRESHOLDS[0]))
    traces: list[TracedRound] = []
    policy, choice = DraftingPolicy(start), None
    for turn in range(ROUNDS):
        own = [found for text in texts for found in take(text, policy=policy, skip=turn)]
        traces += own
        before, (choice, table) = (
            choice,
            search(traces, costs, drafter.block, nodes=nodes, depth=depth),
        )
        announce(_line(choice, len(traces)))
        same = before is not None and (before.paths, before.threshold) == (
            choice.paths,
            choice.threshold,
        )
        if same:
            break
        policy = DraftingPolicy(choice.paths, logarithm(choice.threshold))
    assert choice is not None
    return Chosen(choice, table, traces, own)


def _line(choice: Choice, rounds: int) -> str:
    tree, stopping = choice.candidate, "no controller"
    if choice.threshold is not None:
        stopping = f"confidence {choice.threshold:g}"
    height = max(map(len, tree.paths), default=0)
    return (
        f"  after {rounds} rounds: {len(tree.paths)} nodes, depth {height}, {stopping}, "
        f"{tree.tokens:.2f} tokens in {1000 * tree.seconds:.2f} ms"
    )


NODES = (6, 8, 10, 12, 16, 24, 32, 48, 64)
GROWN_THRESHOLDS = (0.1, 0.2, 0.3, 0.5)
BEAMS = (1, 2, 4)
PATIENCE = 2
"""Sizes in a row that may bring nothing before no larger one is tried."""


@dataclass(frozen=True)
class Growth:
    """Holds a dynamic tree and its estimate.

    Attributes:
        tree: its options.
        threshold: of the ``confidence`` controller; None is ``fixed``.
        estimate: on the texts.
    """

    tree: DynamicTreeConfig
    threshold: float | None
    estimate: Estimate


def best_growth(
    bench: Bench, texts: Sequence[Text], costs: Costs, *, nodes: int, depth: int
) -> Growth:
    """Find the limits with the most expected tokens a second, found one after the other.

    First nodes and threshold together, with a beam of two; nodes are added while it helps. Then
    the beam.

    Args:
        bench: what is replayed.
        texts: the target's own.
        costs: of this machine.
        nodes: most draft tokens.
        depth: longest path.
    """

    def attempt(size: int, beam: int, threshold: float | None) -> Growth:
        tree = DynamicTreeConfig(nodes=size, beam=beam, width=4, depth=depth)
        return Growth(tree, threshold, _estimate(bench, texts, costs, tree, threshold))

    found: list[Growth] = []
    for threshold in (None, *GROWN_THRESHOLDS):
        rates: list[float] = []
        for size in [n for n in NODES if n <= nodes] or [nodes]:
            found.append(attempt(size, 2, threshold))
            rates.append(found[-1].estimate.rate)
            if len(rates) - rates.index(max(rates)) > PATIENCE:
                break
    best = max(found, key=_rate)
    beams = [attempt(best.tree.nodes, b, best.threshold) for b in BEAMS if b != best.tree.beam]
    return max([best, *beams], key=_rate)


def _rate(growth: Growth) -> float:
    return growth.estimate.rate


def _estimate(
    bench: Bench,
    texts: Sequence[Text],
    costs: Costs,
    tree: DynamicTreeConfig,
    threshold: float | None,
) -> Estimate:
    engine = bench.engine(DynamicTree(tree, bench.context))
    controller: LengthController = Fixed(FixedConfig(), bench.context)
    if threshold is not None:
        controller = Confidence(ConfidenceConfig(threshold=threshold), bench.context)
    engine.controller = controller
    return estimate(engine, texts, costs, builder="dynamic", asked=threshold is not None)
