"""Describe a comparison: its budgets, its YAML's keys, its heads. Imports no torch.

A comparison's YAML is an experiment that all heads share, ``heads`` with what each has of its own,
and the other keys of ``ComparisonConfig``. ``Plan`` is the same, read and checked by ``loading``.

A budget (``tree-32``) limits what the target verifies in a round. How a head fills it is up to
the head: a tree grows where the head is surest, by one rule for all of them: EAGLE-2's
(``trees/best_first.py``) with N nodes, paths of up to ``DEPTH``, and a beam and width of √N, which
lies between this repository's default (16 nodes, 4) and EAGLE-2's own (60 nodes, 10). A tree drawn
by hand would favour the head that it was drawn for, and ``optimal`` has no beam, so that a head
with k = 1 would pay for N blocks a pass. Depth counts tokens, not passes: a head with a larger k
reaches it in fewer passes, which is what it was built for; the head's controller may stop before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import sqrt
from pathlib import Path
from typing import Any

from falcon_lab.config.saved import DESCRIPTION, opened_drafter
from falcon_lab.config.schema import (
    PLAIN,
    EvaluationConfig,
    Experiment,
    Node,
    PromptsConfig,
    any_path,
    any_temperature,
)
from falcon_lab.errors import ConfigError, did_you_mean
from falcon_lab.fields import Name, each_once, named, ranged
from falcon_lab.plugins.registry import Components
from falcon_lab.report.tables import Table

OWN, BEST = "own", "best"
DEPTH = 8
"""Longest path of ``tree-N``, that of the paper's trees for k = 2."""
KNOWN = ("chain-4", "tree-16", OWN, BEST)
"""What is suggested for a word that is none."""


@dataclass(frozen=True)
class NodeBudget:
    """A word of ``budgets``.

    Attributes:
        word: as it is written.
        nodes: most draft tokens of a round; None for ``own`` and ``best``.
    """

    word: str
    nodes: int | None = None

    def tree(self, own: Node) -> Node:
        """Return the tree builder's node; ``own`` is the head's."""
        if self.nodes is None:
            return own
        if self.word.startswith("chain"):
            return {"name": "chain", "depth": self.nodes}
        side = max(2, round(sqrt(self.nodes)))
        return {
            "name": "dynamic",
            "nodes": self.nodes,
            "beam": side,
            "width": side,
            "depth": min(DEPTH, self.nodes),
        }


def parse_budget(word: str, key: str) -> NodeBudget:
    """Read ``chain-D``, ``tree-N``, ``own`` or ``best``.

    Raises:
        ConfigError: at ``key``, for any other word.
    """
    if word in (OWN, BEST):
        return NodeBudget(word)
    found = re.fullmatch(r"(chain|tree)-([1-9]\d*)", word)
    if found is None:
        hint = did_you_mean(word, KNOWN)
        words = "chain-D, tree-N, own or best"
        raise ConfigError(key, f"no budget {word!r}: write {words}{hint}")
    return NodeBudget(word, int(found[2]))


HEAD_NODES = (
    "drafter",
    "glancing",
    "objective",
    "distillation",
    "tree",
    "acceptance",
    "controller",
)
"""Sections of an experiment that a head may have for itself."""

DECODING_NODES = ("tree", "acceptance", "controller")
"""Those of them that training knows nothing of."""

SHARED = (
    "every head is trained and measured on the same target, data, steps and prompts; "
    f"a head's own are {', '.join(HEAD_NODES)}, optional, train, runs, drafters_of and spend"
)


@dataclass
class TuningConfig:
    """How ``best`` is found: the budget of the grid with the most tokens a second."""

    prompts: int = ranged(4, least=1, most=10**6)
    """Prompts of the validation set that every head answers with every budget of the grid."""
    source: str = any_path("validation")
    """The set, as ``evaluation.prompts.name``; none of its prompts may be measured on."""
    grid: list[str] = each_once(
        field(
            default_factory=lambda: [
                *("own", "chain-2", "chain-4", "chain-6", "chain-8"),
                *("tree-8", "tree-16", "tree-32", "tree-64"),
            ]
        )
    )
    """Budgets to choose from."""


@dataclass
class PaperConfig:
    """Published figures, to be printed beside ours."""

    source: str = ""
    """The paper and its table."""
    budget: str = "best"
    """Budget that a row has which names a head alone."""
    temperature: float = any_temperature(0.0)
    published: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Metric (``speedup``, ``tau``, ``tau_draft``, or ``alpha`` in %) -> column of the table -> row
    -> figure. A row is a head, or ``HEAD BUDGET``."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know of the published figures."""


HEAD_NAME = Name(reserved=rf"{PLAIN}( \d+)?")
"""Names of heads: none is that of plain decoding."""

PROMPT_SET_NAME = Name()
"""Names of prompt sets."""


@dataclass
class ComparisonConfig:
    """What is compared, beside the experiment that all heads share."""

    heads: dict[str, Node] = named(HEAD_NAME)
    """Head -> what differs from the experiment; ``optional: true`` leaves a head out whose plug-in
    is not installed, and ``train: false`` is one that has nothing to train. ``runs`` names folders
    of finished runs, one a seed, whose drafters it has. ``drafters_of`` names another head whose
    trained drafters this one uses, to decode with them otherwise. ``spend`` says what else differs
    at a budget, for a head that the rule does not fit."""
    only: list[str] = each_once(field(default_factory=list))
    """Heads that are compared; empty: all."""
    budgets: list[str] = each_once(field(default_factory=lambda: ["best"]))
    """``chain-D`` (D tokens in a row, the likeliest, or drawn above temperature 0), ``tree-N`` (N
    nodes where the drafter is surest), ``own`` (the head's tree) and ``best`` (of those in
    ``tuning.grid``, on validation prompts)."""
    temperatures: list[float] = each_once(any_temperature([0.0]))
    prompts: dict[str, PromptsConfig] = named(PROMPT_SET_NAME)
    """Name of a prompt set in the tables -> the set, as ``evaluation.prompts``, which is the only
    one if there is none here."""
    tuning: TuningConfig = field(default_factory=TuningConfig)
    paper: PaperConfig | None = None


COMPARISON_KEYS = tuple(f.name for f in fields(ComparisonConfig))


@dataclass(frozen=True)
class Head:
    """A drafter head of the comparison.

    Attributes:
        name: in the tables.
        trains: whether it has weights.
        experiments: training seed -> the experiment that trains it, in its run's folder.
        folders: training seed -> the saved drafter's folder.
        drafters_of: the head whose drafters it uses; empty for one with its own.
        spend: budget -> the experiment that says how the head spends it, where the rule does not.
        given: whether its drafters are those of finished runs, and nothing is trained.
    """

    name: str
    trains: bool
    experiments: dict[int, Experiment]
    folders: dict[int, Path]
    drafters_of: str = ""
    spend: dict[str, Experiment] = field(default_factory=dict)
    given: bool = False

    def at(self, budget: NodeBudget) -> tuple[Experiment, Node]:
        """The experiment that holds at a budget, and its tree."""
        if budget.word in self.spend:
            return self.spend[budget.word], self.spend[budget.word].tree
        return self.experiment, budget.tree(self.experiment.tree)

    @property
    def first(self) -> Head:
        """Return the head with its first seed alone."""
        seed = self.seeds[0]
        return replace(
            self,
            experiments={seed: self.experiments[seed]},
            folders={seed: self.folders[seed]},
        )

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
        return not self.trains or (self.folders[seed] / DESCRIPTION).exists()


def saved_parts(node: Any, components: Components) -> list[Path]:
    """Return the folders of the saved drafters that a drafter is made of.

    Args:
        node: of the drafter; one that names no component has none.
        components: the registry, which knows options that are components and saved drafters.
    """
    folders: list[Path] = []

    def note(kind: str, inner: dict[str, Any]) -> dict[str, Any]:
        path = inner.get("path")
        if (kind, inner["name"]) == ("drafter", "saved") and path is not None:
            with opened_drafter(path, components) as folder:
                folders.append(folder)
        return inner

    if isinstance(node, Mapping) and isinstance(node.get("name"), str):
        components.replaced("drafter", node, note)
    return folders


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
    """

    base: Experiment
    config: ComparisonConfig
    budgets: list[NodeBudget]
    grid: list[NodeBudget]
    heads: list[Head]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def trainings(self) -> list[tuple[Head, int]]:
        """Return the trainings that are this comparison's own, done or not."""
        own = (head for head in self.heads if head.trains and not (head.given or head.drafters_of))
        return [(head, seed) for head in own for seed in head.seeds]

    @property
    def prompt_sets(self) -> dict[str, PromptsConfig]:
        """Return name -> the set of prompts that is measured on."""
        alone = self.base.evaluation.prompts
        return self.config.prompts or {"own" if alone.texts else alone.name: alone}

    def evaluation(self, prompt_set: str, temperature: float) -> EvaluationConfig:
        """Return how a prompt set is measured at a temperature."""
        prompts = self.prompt_sets[prompt_set]
        evaluation = self.base.evaluation
        return replace(evaluation, prompts=prompts, temperature=temperature, methods={})

    @property
    def folder(self) -> Path:
        """Where everything is kept. Several comparisons may share it, and their trained heads."""
        return Path(self.base.out)

    @property
    def pending(self) -> list[tuple[Head, int]]:
        """Trainings that are still to be done."""
        return [(head, seed) for head, seed in self.trainings if not head.trained(seed)]

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
        borrowed = f"as {head.drafters_of}" if head.drafters_of else ""
        needs = borrowed or ("by its run" if head.given else "needs none")
        block = f", k={node['block']}" if "block" in node else ""
        done = sum(head.trained(seed) for seed in head.seeds)
        rows.append(
            (
                head.name,
                f"{node['name']}{block}",
                " ".join(map(str, head.seeds)) if head.trains else "none",
                f"{done} of {len(head.seeds)}"
                if head.trains and not (head.given or head.drafters_of)
                else needs,
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
    sets = [_size(name, prompts) for name, prompts in plan.prompt_sets.items()]
    lines = [
        f"trainings to do: {len(plan.pending)}" + (f", {steps} steps each" if steps else ""),
        f"then {drafters} drafters × {len(plan.budgets)} budgets "
        f"({', '.join(budget.word for budget in plan.budgets)}) × temperature "
        f"{' and '.join(temperatures)} on {', '.join(sets)}, "
        f"{plan.base.evaluation.max_new_tokens} tokens each",
    ]
    if plan.wants_best:
        lines.append(
            f"best: of {', '.join(budget.word for budget in plan.grid)}, chosen for every head and "
            f"temperature on {plan.config.tuning.prompts} prompts of {plan.config.tuning.source}"
        )
    return lines


def _size(name: str, prompts: PromptsConfig) -> str:
    number = prompts.limit or len(prompts.texts)
    return f"{number if number else 'all'} prompts of {name}"
