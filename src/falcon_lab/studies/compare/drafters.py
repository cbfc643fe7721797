"""Train the drafters of a comparison, each by a run of its own, and load those that are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from falcon_lab.config.saved import HISTORY
from falcon_lab.config.schema import Experiment, MethodConfig, Node
from falcon_lab.config.trainer import training_steps, training_tokens
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.drafters.saved import WEIGHTS, read_config
from falcon_lab.errors import FalconLabError
from falcon_lab.history import read_history
from falcon_lab.interfaces import Drafter
from falcon_lab.measure.engines import Setup, label
from falcon_lab.run import Run, keep_to_one_device
from falcon_lab.studies.compare.plan import Head, NodeBudget, Plan, saved_parts

TIME, VALIDATION = "train/time/", "val/"


def train_heads(
    plan: Plan, announce: Callable[[str], None], train: Callable[[Experiment], object]
) -> None:
    """Train every head with every seed, as far as that has not been done.

    Args:
        plan: of the comparison.
        announce: is called with one line for the user at a time.
        train: runs an experiment.

    Raises:
        FalconLabError: a folder holds a drafter of other settings, or a training went astray.
    """
    pending = len(plan.pending)
    for head, seed in plan.trainings:
        run = head.experiments[seed]
        keep_to_one_device(run)
        if head.trained(seed):
            with Run.open(run, announce=announce):
                continue  # its settings are those of the folder
        announce(f"== {head.name}, seed {seed} ({pending} to train)")
        pending -= 1
        train(run)


def training_facts(head: Head, seed: int) -> dict[str, Any]:
    """Return what a training took and reached, as far as it is known.

    Seconds are the mean of the steps whose time was logged, times the steps: what the machine does
    between steps (validation, checkpoints) is not the head's.
    """
    run = head.experiments[seed]
    steps = training_steps(run.trainer)
    folder = head.folders[seed].parent
    history = read_history(folder / HISTORY)
    logged = [
        sum(value for key, value in record.items() if key.startswith(TIME))
        for record in history
        if any(key.startswith(TIME) for key in record)
    ]
    reached: dict[str, float] = {}
    for record in history:
        reached |= {key: value for key, value in record.items() if key.startswith(VALIDATION)}
    return {
        "seed": seed,
        "folder": str(folder),
        "steps": steps,
        "tokens": training_tokens(run),
        "seconds": steps * sum(logged) / len(logged) if logged else None,
        "validation": reached,
    }


Budgets = Mapping[str, Sequence[NodeBudget]]
"""Head -> its budgets, each once."""


@dataclass(frozen=True)
class EngineKey:
    """Names one engine of the comparison."""

    head: str
    budget: str
    seed: int

    @property
    def name(self) -> str:
        """Return the engine's name in the measurement."""
        return f"{self.head} {self.budget} seed {self.seed}"


@dataclass(frozen=True)
class EngineFacts:
    """What tables say of an engine; it stands beside its answers, so that it need not be made.

    Attributes:
        fits: whether a round of it keeps to its budget; one that does not is not measured.
        lossless: whether its rule is.
        block: k of its drafter.
        parameters: of the drafter; the target's embedding and head are not among them.
        compiled: whether the drafter is.
    """

    fits: bool
    lossless: bool
    block: int
    parameters: int
    compiled: bool


@dataclass(frozen=True)
class TrainedDrafter:
    """Names a drafter of the comparison, which is loaded when it is first asked for.

    Attributes:
        head: what it is one of.
        seed: of its training.
        node: of the drafter.
        weights: identifies them; empty for a drafter without weights.
        others: budget -> the node of a drafter of its own, for a head without weights that spends
            it so.
        load: the same budget, or an empty word for all others -> the drafter. It is loaded once and
            shared by its engines, of which one decodes at a time.
    """

    head: Head
    seed: int
    node: Node
    weights: str
    others: dict[str, Node]
    load: Callable[[str], Drafter]

    @property
    def drafter(self) -> Drafter:
        """Return the drafter of all budgets but ``others``."""
        return self.load("")

    def nodes(self, budget: NodeBudget) -> dict[str, Node]:
        """Return the components of an engine beside the drafter."""
        own, tree = self.head.at(budget)
        return {"tree": tree, "acceptance": own.acceptance, "controller": own.controller}

    def node_at(self, budget: NodeBudget) -> Node:
        """Return the drafter's node at a budget."""
        return self.others.get(budget.word, self.node)

    def key(self, budget: NodeBudget) -> EngineKey:
        """Name this drafter's engine with a budget."""
        return EngineKey(self.head.name, budget.word, self.seed)

    def label(self, budget: NodeBudget, block: int) -> str:
        """Describe its engine with a budget in a few words; ``block`` is k there."""
        nodes = self.nodes(budget)
        return label(self.node_at(budget), block, nodes["tree"], nodes["controller"])

    def engine(self, budget: NodeBudget, setup: Setup) -> SpeculativeEngine:
        """Build its engine with a budget.

        Raises:
            FalconLabError: they do not go together; names head and budget.
        """
        drafter = self.load(budget.word if budget.word in self.others else "")
        try:
            return setup.engine(drafter, self.nodes(budget))
        except FalconLabError as error:
            raise FalconLabError(f"{self.head.name} with {budget.word}: {error}") from error


def drafters_of(plan: Plan, setup: Setup, *, fresh: bool = False) -> list[TrainedDrafter]:
    """Name every head with every seed; none is loaded yet.

    Args:
        plan: of the comparison.
        setup: loads and builds them.
        fresh: whether an untrained drafter takes the place of one that is yet to be trained.

    Raises:
        FalconLabError: a drafter is not there.
    """
    announced = set[str]()

    def once(line: str) -> None:
        """Announce a line once: the seeds of a head repeat it."""
        if line not in announced:
            setup.announce(line)
        announced.add(line)

    quiet = replace(setup, announce=once)
    return [
        _named(head, seed, quiet, untrained=fresh and not head.trained(seed))
        for head in plan.heads
        for seed in head.seeds
    ]


def _named(head: Head, seed: int, setup: Setup, *, untrained: bool) -> TrainedDrafter:
    """Name a head with a seed."""
    folder = head.folders[seed]
    if head.trains and not untrained:
        configs, trained, weights = {"": MethodConfig()}, folder, digest_of(folder)
    else:
        configs, trained = {"": MethodConfig(drafter=head.experiments[seed].drafter)}, Path()
        weights = ""
    if not head.trains:
        configs |= {word: MethodConfig(drafter=run.drafter) for word, run in head.spend.items()}
        parts = saved_parts(head.experiment.drafter, setup.components)
        weights = "+".join(map(digest_of, parts))
    nodes = {word: setup.node_of(config, trained) for word, config in configs.items()}

    @cache
    def load(word: str) -> Drafter:
        return setup.drafter(configs[word], trained)[0]

    return TrainedDrafter(head, seed, nodes.pop(""), weights, nodes, load)


def digest_of(folder: Path) -> str:
    """Identify a saved drafter's weights."""
    with (folder / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def facts_of(engine: SpeculativeEngine, budget: NodeBudget) -> EngineFacts:
    """Return what tables say of an engine that is made for a budget."""
    drafter = engine.drafter
    weights = drafter.parameters() if isinstance(drafter, nn.Module) else ()
    return EngineFacts(
        fits=budget.nodes is None or engine.max_nodes - 1 <= budget.nodes,
        lossless=engine.lossless,
        block=drafter.block,
        parameters=sum(weight.numel() for weight in weights),
        compiled=drafter.is_compiled,
    )


def described(drafters: Iterable[TrainedDrafter], budgets: Budgets) -> dict[str, Any]:
    """Return engine -> what decides what it writes and how fast."""
    return {
        one.key(budget).name: {
            "drafter": one.node_at(budget),
            "weights": one.weights,
            **one.nodes(budget),
        }
        for one in drafters
        for budget in budgets[one.head.name]
    }


def same_target(plan: Plan) -> None:
    """See that all saved drafters were trained for one target, before it is loaded.

    Raises:
        FalconLabError: two were not; both folders are named.
    """
    first: tuple[str, Any] | None = None
    for head in plan.heads:
        for folder in head.folders.values() if head.given else ():
            fingerprint = read_config(folder)["target"]["fingerprint"]
            if first is not None and first[1] != fingerprint:
                raise FalconLabError(
                    f"{first[0]} was trained for the target {first[1]}, and {folder} for "
                    f"{fingerprint}: drafters are compared on one target"
                )
            first = first or (str(folder), fingerprint)
