"""What each kind of component does, and the values that pass between them.

A plug-in author reads this package and ``plugins/hooks.py``. A component derives from the class of
its kind and overrides what it needs; one that does not is given that class's defaults when it is
built.

Positions. ``features[t]`` (h_t) is what the target feeds to its LM head after reading token x_t, so
``head(h_t)`` predicts x_{t+1}. A drafter reads pairs (x_{t+1}, h_t): the token one step ahead next
to the feature, as EAGLE and Falcon do.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from falcon_lab.interfaces.decoding import (
    Acceptance,
    AcceptanceRule,
    Budget,
    DraftOutput,
    Frontier,
    LengthController,
    PaddedAcceptance,
    RoundContext,
    RoundOutcome,
    TreeBuilder,
)
from falcon_lab.interfaces.drafting import (
    Announce,
    BeginsRounds,
    BuildContext,
    Compiled,
    ComponentBuilder,
    Drafter,
    DrafterHost,
    DraftSequences,
    EngineContext,
    Observation,
    Outputs,
    PassCompiler,
    Recorder,
    Run,
    TargetContext,
    TrainableDrafter,
    begins_rounds,
    is_trainable,
)
from falcon_lab.interfaces.layers import (
    DraftTokens,
    LayerPlan,
    LowerLayers,
    MlpGate,
    RunsTarget,
    SideBySide,
    TargetLayers,
)
from falcon_lab.interfaces.training import (
    DrafterInputs,
    FirstWeights,
    GlanceRows,
    GlancingSchedule,
    LabelledRows,
    Objective,
    Prediction,
    Reveal,
)
from falcon_lab.interfaces.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from falcon_lab.interfaces.exporting import (
        Exported,
        ExportFormat,
        ImportFormat,
        StrangersFolder,
        TrainedDrafter,
    )
    from falcon_lab.interfaces.tuning import TargetTuner, TuningBatch

__all__ = [
    "BASES",
    "Acceptance",
    "AcceptanceRule",
    "Announce",
    "BeginsRounds",
    "Budget",
    "BuildContext",
    "Compiled",
    "ComponentBuilder",
    "DraftOutput",
    "DraftSequences",
    "DraftTokens",
    "DraftVocabulary",
    "Drafter",
    "DrafterHost",
    "DrafterInputs",
    "EngineContext",
    "ExportFormat",
    "Exported",
    "FirstWeights",
    "Frontier",
    "GlanceRows",
    "GlancingSchedule",
    "ImportFormat",
    "LabelledRows",
    "LayerPlan",
    "LengthController",
    "LowerLayers",
    "MlpGate",
    "Objective",
    "Observation",
    "Outputs",
    "PaddedAcceptance",
    "PassCompiler",
    "Prediction",
    "Recorder",
    "Reveal",
    "RoundContext",
    "RoundOutcome",
    "Run",
    "RunsTarget",
    "SideBySide",
    "StrangersFolder",
    "TargetContext",
    "TargetLayers",
    "TargetTuner",
    "TrainableDrafter",
    "TrainedDrafter",
    "TreeBuilder",
    "TuningBatch",
    "begins_rounds",
    "is_trainable",
]

BASES: Mapping[str, str] = {
    "tuner": "TargetTuner",
    "drafter": "Drafter",
    "schedule": "GlancingSchedule",
    "tree_builder": "TreeBuilder",
    "acceptance_rule": "AcceptanceRule",
    "controller": "LengthController",
    "objective": "Objective",
}
"""Kind of component that is an object -> its class here; the registry fills in its defaults."""

WHEN_ASKED_FOR: Mapping[str, str] = {
    "ExportFormat": "exporting",
    "Exported": "exporting",
    "ImportFormat": "exporting",
    "StrangersFolder": "exporting",
    "TrainedDrafter": "exporting",
    "TargetTuner": "tuning",
    "TuningBatch": "tuning",
}
"""Names that neither decoding nor training a drafter needs -> the file that has them."""

if not TYPE_CHECKING:  # mypy would take every name for one of these

    def __getattr__(name: str) -> Any:
        """Import one of ``WHEN_ASKED_FOR``."""
        if name not in WHEN_ASKED_FOR:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{WHEN_ASKED_FOR[name]}"), name)
