"""Checks that a component does what its kind requires; one line in a plug-in's test is enough.

    from falcon_lab.testing import check_drafter

    def test_my_head_keeps_its_promises() -> None:
        check_drafter({"name": "my-head", "hidden": 16})

Every check is given a YAML node, whose plug-in must be installed, or a function that builds the
component from its context. It makes tiny targets in memory, needs neither a test runner nor
a network nor a GPU, and is seeded. What does not hold is a ``ContractError``, which is an
``AssertionError``: it says what was expected, what was found, and what to do.

The rest is for tests of a component's own, with or without a test runner: tiny targets, engines and
the texts that they write, whether sampled text fits the target (``fit``), a few steps of
distillation (``distil``), and a distribution's components as if it were installed.
"""

from __future__ import annotations

from falcon_lab.testing.acceptance_rules import check_acceptance
from falcon_lab.testing.controllers import check_controller
from falcon_lab.testing.decoding import (
    TREES,
    accepted,
    build_drafter,
    engine,
    fit,
    lossless_rounds,
    plain_text,
    write,
    write_together,
)
from falcon_lab.testing.distilling import distil, distillation, own_texts
from falcon_lab.testing.distributions import check_distribution, components_of
from falcon_lab.testing.drafters import check_drafter
from falcon_lab.testing.engines import check_engine
from falcon_lab.testing.exports import check_export, check_import, save_for_export
from falcon_lab.testing.objectives import check_objective
from falcon_lab.testing.schedules import check_schedule
from falcon_lab.testing.sources import check_target
from falcon_lab.testing.targets import packed, tiny_target, training_inputs
from falcon_lab.testing.tested import ContractError
from falcon_lab.testing.tree_builders import check_tree_builder
from falcon_lab.testing.tuners import check_tuner

__all__ = [
    "TREES",
    "ContractError",
    "accepted",
    "build_drafter",
    "check_acceptance",
    "check_controller",
    "check_distribution",
    "check_drafter",
    "check_engine",
    "check_export",
    "check_import",
    "check_objective",
    "check_schedule",
    "check_target",
    "check_tree_builder",
    "check_tuner",
    "components_of",
    "distil",
    "distillation",
    "engine",
    "fit",
    "lossless_rounds",
    "own_texts",
    "packed",
    "plain_text",
    "save_for_export",
    "tiny_target",
    "training_inputs",
    "write",
    "write_together",
]
