"""Does a component keep what its kind promises? One line in a plug-in's test says so.

    from falcon_lab.testing import check_drafter

    def test_my_head_keeps_its_promises() -> None:
        check_drafter({"name": "my-head", "hidden": 16})

Every check takes a YAML node, whose plug-in must be installed, or a function that builds the
component from a ``BuildContext``. It makes tiny targets in memory, needs neither a test runner nor
a network nor a GPU, and is seeded. What does not hold is a ``ContractError``, which is an
``AssertionError``: it says what was expected, what was found, and what to do.
"""

from __future__ import annotations

from falcon_lab.testing.acceptance_rules import check_acceptance
from falcon_lab.testing.controllers import check_controller
from falcon_lab.testing.drafters import check_drafter
from falcon_lab.testing.objectives import check_objective
from falcon_lab.testing.schedules import check_schedule
from falcon_lab.testing.subject import ContractError
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tree_builders import check_tree_builder

__all__ = [
    "ContractError",
    "check_acceptance",
    "check_controller",
    "check_drafter",
    "check_objective",
    "check_schedule",
    "check_tree_builder",
    "tiny_target",
]
