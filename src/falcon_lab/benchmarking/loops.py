"""Our own loops, as rows of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.benchmarking.hf_modes import hf_modes
from falcon_lab.benchmarking.methods import DRAFTER, PLAIN
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.evaluation.benchmark import Engine
from falcon_lab.evaluation.engines import build_methods
from falcon_lab.schema import DecodingConfig, Experiment
from falcon_lab.targets.backbone import Backbone
from falcon_lab.targets.self_check import check_target

if TYPE_CHECKING:
    from falcon_lab.components import Components
    from falcon_lab.targets.target import Target

LEAN, MODULES = "plain, lean forward", "plain, HF modules"
EAGER = "plain, not compiled"


@dataclass
class Contest:
    """What is compared.

    Attributes:
        engines: row -> what decodes, ``plain`` first.
        ours: rows that are our own loops.
        speculative: those of them that draft.
        labels: row -> what it is, in a few words.
        provenance: row -> kind -> name, distribution and version.
        left_out: row -> why it is not measured.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)
    speculative: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def contest(
    experiment: Experiment,
    target: Target,
    components: Components,
    methods: Collection[str],
    assistant: Target | None = None,
    *,
    attempt: Callable[[Any], object],
) -> Contest:
    """Every row that ``methods`` asks for.

    ``plain`` and the drafter's rows go through the forward pass that ``target.lean`` asks for; the
    same loop through the other one stands beside them.

    ``attempt`` lets a row generate once, to see whether it can.

    Raises:
        FalconLabError: a part of a method is not there.
    """
    found = Contest({PLAIN: PlainEngine(target, decoding=experiment.decoding)}, ours=[PLAIN])
    theirs, found.left_out = hf_modes(target, methods, assistant, attempt=attempt)
    found.engines |= theirs
    if PLAIN in methods:
        add_other_forward(found, target, experiment.decoding)
    if DRAFTER in methods:
        built = build_methods(experiment, target, components, Path())
        found.engines |= built.engines
        found.speculative = list(built.engines)
        found.ours += found.speculative
        found.labels, found.provenance = built.labels, built.provenance
        found.left_out |= built.left_out
    return found


def add_other_forward(found: Contest, target: Target, decoding: DecodingConfig) -> None:
    """The plain loop through the forward passes that the target does not take."""
    if target.is_compiled:
        found.engines[EAGER] = PlainEngine(target.plain(), decoding=decoding)
        found.ours.append(EAGER)
    lean = target.backbone.lean is None
    name = LEAN if lean else MODULES
    twin = target.plain()
    twin.backbone = Backbone(target.model.get_decoder(), lean=lean)
    if lean and twin.backbone.lean is None:
        found.left_out[name] = f"there is none for {target.config.model_type}"
        return
    check_target(twin)
    found.engines[name] = PlainEngine(twin, decoding=decoding)
    found.ours.append(name)
