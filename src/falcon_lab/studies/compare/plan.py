"""A comparison without a YAML: run folders whose drafters are measured side by side.

Imports no torch.

What a comparison will do: its heads, each with an experiment a seed. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from falcon_lab.config.schema import Experiment, Node
from falcon_lab.report.tables import Table
from falcon_lab.studies.compare.budgets import BEST, NodeBudget
from falcon_lab.studies.compare.config import ComparisonConfig


@dataclass(frozen=True)
class Head:
    """A drafter head of the comparison.

    Attributes:
        name: in the tables.
        trains: whether it has weights.
        experiments: training seed -> the experiment that trains it, in its run's folder.
        folders: training seed -> the saved drafter's folder.
        drafters_of: the head whose drafters it takes; empty for one with its own.
        spend: budget -> the experiment that says how the head spends it, where the rule does not.
    """

    name: str
    trains: bool
    experiments: dict[int, Experiment]
    folders: dict[int, Path]
    drafters_of: str = ""
    spend: dict[str, Experiment] = field(default_factory=dict)

    def at(self, budget: NodeBudget) -> tuple[Experiment, Node]:
        """The experiment that holds at a budget, and its tree."""
        if budget.word in self.spend:
            return self.spend[budget.word], self.spend[budget.word].tree
        return self.experiment, budget.tree(self.experiment.tree)

    @property
    def experiment(self) -> Experiment:
        """That of the first seed: they differ in nothing else."""
        return next(iter(self.experiments.values()))

    @property
    def seeds(self) -> list[int]:
        """Return the training seeds; one for a head without weights."""
        return list(self.experiments)

    def trained(self, seed: int) -> bool:
        """Whether there is nothing to train any more."""
        return not self.trains or (self.folders[seed] / "config.json").exists()


@dataclass(frozen=True)
class Plan:
    """A comparison, checked.

    Attributes:
        base: the experiment that all heads share.
        config: the rest.
        budgets: its words, read.
        grid: those that ``best`` is chosen from.
        heads: those that can be compared.
        left_out: optional head -> why it is not.
        given: whether the runs were named one by one; nothing is trained then.
    """

    base: Experiment
    config: ComparisonConfig
    budgets: list[NodeBudget]
    grid: list[NodeBudget]
    heads: list[Head]
    left_out: dict[str, str] = field(default_factory=dict)
    given: bool = False

    @property
    def folder(self) -> Path:
        """Where everything is kept. Several comparisons may share it, and their trained heads."""
        return Path(self.base.out)

    @property
    def pending(self) -> list[tuple[Head, int]]:
        """Trainings that are still to be done."""
        own = (head for head in self.heads if not head.drafters_of)
        return [(head, seed) for head in own for seed in head.seeds if not head.trained(seed)]

    @property
    def wants_best(self) -> bool:
        """Whether every head's best budget is to be found."""
        return any(budget.word == BEST for budget in self.budgets)


def describe(plan: Plan) -> str:
    """Write the plan as a user reads it before it is run."""
    columns = ("head", "drafter", "seeds", "trained", "folder")
    rows = []
    for head in plan.heads:
        node = head.experiment.drafter
        needs = f"as {head.drafters_of}" if head.drafters_of else "needs none"
        block = f", k={node['block']}" if "block" in node else ""
        done = sum(head.trained(seed) for seed in head.seeds)
        rows.append(
            (
                head.name,
                f"{node['name']}{block}",
                " ".join(map(str, head.seeds)) if head.trains else "none",
                f"{done} of {len(head.seeds)}" if head.trains and not head.drafters_of else needs,
                str(head.folders[head.seeds[0]].parent) if head.trains else "",
            )
        )
    lines = [Table.of(columns, rows).text(), ""]
    lines += [f"left out: {name} ({why})" for name, why in plan.left_out.items()]
    return "\n".join([*lines, *_amounts(plan)])


def _amounts(plan: Plan) -> list[str]:
    drafters = sum(len(head.seeds) for head in plan.heads)
    temperatures = [f"{temperature:g}" for temperature in plan.config.temperatures]
    steps = plan.base.trainer.get("max_steps")
    evaluation = plan.base.evaluation
    prompts = evaluation.prompts.limit or len(evaluation.prompts.texts)
    size = f"{prompts} prompts" if prompts else "all prompts"
    lines = [
        f"trainings to do: {len(plan.pending)}" + (f", {steps} steps each" if steps else ""),
        f"then {drafters} drafters × {len(plan.budgets)} budgets "
        f"({', '.join(budget.word for budget in plan.budgets)}) × temperature "
        f"{' and '.join(temperatures)} on {size} of {evaluation.prompts.name}, "
        f"{evaluation.max_new_tokens} tokens each",
    ]
    if plan.wants_best:
        lines.append(
            f"best: of {', '.join(budget.word for budget in plan.grid)}, chosen for every head and "
            f"temperature on {plan.config.tuning.prompts} prompts of {plan.config.tuning.source}"
        )
    return lines
