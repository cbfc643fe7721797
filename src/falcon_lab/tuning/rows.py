"""What the tuned tree is compared with: every tree that ships, and the experiment's own."""

from __future__ import annotations

from typing import Any

from falcon_lab.schema import Experiment, MethodConfig

TUNED, DYNAMIC, OWN = "tuned", "tuned dynamic", "own"

TEMPLATES = {2: ("llama", "vicuna"), 3: ("k3",), 4: ("k4",)}
"""k -> large templates that were drawn for it."""


def shipped_trees(block: int) -> list[str]:
    """Trees as ``--tree`` takes them: chains, templates for k, and those that follow the drafter.

    Args:
        block: k.
    """
    chains = [f"chain,depth={depth}" for depth in (4, 6, 8)]
    names = ["auto", f"k{block}-8", f"k{block}-10-d8", *TEMPLATES.get(block, ())]
    templates = [f"static,template={name}" for name in names]
    return [*chains, *templates, "dynamic", "optimal"]


def add_own(experiment: Experiment) -> None:
    """A row for the experiment's own tree, unless another row has it already."""
    own = (experiment.tree, experiment.controller)
    rows = experiment.evaluation.methods.values()
    if all((row.tree, row.controller or experiment.controller) != own for row in rows):
        first = next(iter(rows))
        experiment.evaluation.methods[OWN] = MethodConfig(
            drafter=first.drafter, drafter_path=first.drafter_path, tree=experiment.tree
        )


def add_row(experiment: Experiment, name: str, tree: dict[str, Any], controller: Any) -> None:
    """A row of the same drafter with a tree and a controller of its own; nodes are complete."""
    first = next(iter(experiment.evaluation.methods.values()))
    experiment.evaluation.methods[name] = MethodConfig(
        drafter=first.drafter, drafter_path=first.drafter_path, tree=tree, controller=controller
    )
