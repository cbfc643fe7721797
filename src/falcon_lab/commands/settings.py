"""The engine that ``generate`` and ``check`` decode with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from falcon_lab.config.saved import names_a_drafter
from falcon_lab.config.schema import Experiment, MethodConfig
from falcon_lab.decoding.compiling import choose_target
from falcon_lab.measure.engines import Methods, add_method
from falcon_lab.plugins.discovery import load_components
from falcon_lab.pretraining.target import ensure_target

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.model.target import Target


def load(experiment: Experiment, announce: Callable[[str], None]) -> Target:
    """The experiment's target on its device."""
    target: Target = ensure_target(experiment.target, announce)
    return choose_target(target, experiment.decoding, announce)


def speculative(
    experiment: Experiment, target: Target, drafter: Path | None, overrides: Sequence[str]
) -> SpeculativeEngine | None:
    """The engine with the saved drafter, or with the one that the overrides name; None without."""
    if drafter is None and not names_a_drafter(overrides):
        return None
    config = MethodConfig(
        drafter=None if drafter else experiment.drafter,
        drafter_path=str(drafter) if drafter else None,
    )
    methods = Methods()
    nowhere = Path()  # no run has trained anything here
    add_method(methods, "it", config, experiment, target, load_components(), nowhere)
    return methods.engines["it"]
