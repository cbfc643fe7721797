"""Train the drafters of a comparison, each by a run of its own, and load them into one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
class TrainedDrafter:
    """Holds a drafter of the comparison.

    Attributes:
        head: what it is one of.
        seed: of its training.
        drafter: shared by its engines; one of them decodes at a time.
        node: of the drafter.
        weights: identifies them; empty for a drafter without weights.
        others: budget -> a drafter of its own and its node, for a head without weights that spends
            it so.
    """

    head: Head
    seed: int
    drafter: Drafter
    node: Node
    weights: str
    others: dict[str, tuple[Drafter, Node]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Count its own weights; the target's embedding and head are not among them."""
        if not isinstance(self.drafter, nn.Module):
            return 0
        return sum(weight.numel() for weight in self.drafter.parameters())

    def nodes(self, budget: NodeBudget) -> dict[str, Node]:
        """Return the components of an engine beside the drafter."""
        own, tree = self.head.at(budget)
        return {"tree": tree, "acceptance": own.acceptance, "controller": own.controller}

    def drafting(self, budget: NodeBudget) -> tuple[Drafter, Node]:
        """Return the drafter at a budget, and its node."""
        return self.others.get(budget.word, (self.drafter, self.node))

    def key(self, budget: NodeBudget) -> EngineKey:
        """Name this drafter's engine with a budget."""
        return EngineKey(self.head.name, budget.word, self.seed)

    def label(self, budget: NodeBudget) -> str:
        """Describe it in a few words."""
        nodes = self.nodes(budget)
        drafter, node = self.drafting(budget)
        return label(node, drafter.block, nodes["tree"], nodes["controller"])


def load_drafters(plan: Plan, setup: Setup, *, fresh: bool = False) -> list[TrainedDrafter]:
    """Load every head with every seed.

    Args:
        plan: of the comparison.
        setup: loads and builds them.
        fresh: whether an untrained drafter takes the place of one that is yet to be trained.

    Raises:
        FalconLabError: a drafter is not there, or was trained for another target.
    """
    announced = set[str]()

    def once(line: str) -> None:
        """Announce a line once: the seeds of a head repeat it."""
        if line not in announced:
            setup.announce(line)
        announced.add(line)

    quiet = replace(setup, announce=once)
    found = []
    for head in plan.heads:
        for seed, folder in ((seed, head.folders[seed]) for seed in head.seeds):
            if fresh and not head.trained(seed):
                untrained = MethodConfig(drafter=head.experiments[seed].drafter)
                found.append(TrainedDrafter(head, seed, *quiet.drafter(untrained), ""))
                continue
            if head.trains:
                drafter, node = quiet.drafter(MethodConfig(), folder)
                found.append(TrainedDrafter(head, seed, drafter, node, digest_of(folder)))
                continue
            drafter, node = quiet.drafter(MethodConfig(drafter=head.experiment.drafter))
            others = {
                word: quiet.drafter(MethodConfig(drafter=run.drafter))
                for word, run in head.spend.items()
            }
            parts = saved_parts(head.experiment.drafter, setup.components)
            weights = "+".join(map(digest_of, parts))
            found.append(TrainedDrafter(head, seed, drafter, node, weights, others))
    return found


def digest_of(folder: Path) -> str:
    """Identify a saved drafter's weights."""
    with (folder / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def engines_of(
    drafters: Iterable[TrainedDrafter], budgets: Budgets, setup: Setup
) -> dict[EngineKey, SpeculativeEngine]:
    """Build an engine for every drafter and budget that it fits.

    Args:
        drafters: of the comparison.
        budgets: of every head.
        setup: builds the engines.
    """
    engines = {}
    for one in drafters:
        for budget in budgets[one.head.name]:
            drafter, _ = one.drafting(budget)
            try:
                engine = setup.engine(drafter, one.nodes(budget))
            except FalconLabError as error:
                raise FalconLabError(f"{one.head.name} with {budget.word}: {error}") from error
            if budget.nodes is None or engine.max_nodes - 1 <= budget.nodes:
                engines[one.key(budget)] = engine
    return engines


def described(drafters: Iterable[TrainedDrafter], budgets: Budgets) -> dict[str, Any]:
    """Return engine -> what decides what it writes and how fast."""
    return {
        one.key(budget).name: {
            "drafter": one.drafting(budget)[1],
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
