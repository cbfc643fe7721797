"""The keys that a comparison's YAML has beside those of an experiment. Imports no torch.

A comparison's YAML: an experiment with ``heads`` and what else a comparison has.

    base: ../compare.yaml      # optional: what this file does not say is said there
    heads: {falcon: {drafter: {name: falcon, block: 2}}, …}
    only: [falcon, medusa]     # of the heads, also of those of the base

All else is an experiment's. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from falcon_lab.config.schema import Node

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
    f"a head's own are {', '.join(HEAD_NODES)}, optional, train, drafters_of and spend"
)


@dataclass
class TuningConfig:
    """How ``best`` is found: the budget of the grid with the most tokens a second."""

    prompts: int = 4
    """Prompts of the validation set that every head answers with every budget of the grid."""
    source: str = "validation"
    """The set, as ``evaluation.prompts.name``; none of its prompts may be measured on."""
    grid: list[str] = field(
        default_factory=lambda: [
            *("own", "chain-2", "chain-4", "chain-6", "chain-8"),
            *("tree-8", "tree-16", "tree-32", "tree-64"),
        ]
    )
    """Budgets to choose from."""


@dataclass
class PaperConfig:
    """Published figures, to be printed beside ours."""

    source: str = ""
    """The paper and its table."""
    budget: str = "best"
    """Budget that a row has which names a head alone."""
    temperature: float = 0.0
    published: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Metric (``speedup``, ``tau``, ``tau_draft``, or ``alpha`` in %) -> column of the table -> row
    -> figure. A row is a head, or ``HEAD BUDGET``."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know of the published figures."""


@dataclass
class ComparisonConfig:
    """What is compared, beside the experiment that all heads share."""

    heads: dict[str, Node] = field(default_factory=dict)
    """Head -> what differs from the experiment; ``optional: true`` leaves a head out whose plug-in
    is not installed, and ``train: false`` is one that has nothing to train. ``drafters_of`` names
    another head whose trained drafters this one takes, to decode with them otherwise. ``spend``
    says what else differs at a budget, for a head that the rule does not fit."""
    only: list[str] = field(default_factory=list)
    """Heads that are compared; empty takes all."""
    budgets: list[str] = field(default_factory=lambda: ["best"])
    """``chain-D`` (D tokens in a row), ``tree-N`` (N nodes where the drafter is surest), ``own``
    (the head's tree) and ``best`` (of those in ``tuning.grid``, on validation prompts)."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    tuning: TuningConfig = field(default_factory=TuningConfig)
    paper: PaperConfig | None = None


COMPARISON_KEYS = tuple(f.name for f in fields(ComparisonConfig))
