"""The rows that promise most really decode, and one of them is chosen: costs are only a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from falcon_lab.evaluation import metrics
from falcon_lab.evaluation.benchmark import Engine, Measurement, measure
from falcon_lab.evaluation.conversation import EncodedPrompt
from falcon_lab.evaluation.statistics import compare
from falcon_lab.schema import EvaluationConfig
from falcon_lab.tuning.predicting import Promise
from falcon_lab.tuning.rows import DYNAMIC, TUNED

if TYPE_CHECKING:
    from falcon_lab.decoding.stopping import StopCondition

FINALISTS = 5
"""Rows that promise most, the tuned ones always among them."""


def try_finalists(
    engines: Mapping[str, Engine],
    promises: Mapping[str, Promise],
    prompts: Sequence[EncodedPrompt],
    config: EvaluationConfig,
    stop: StopCondition,
) -> Measurement:
    """Let the most promising rows answer prompts in turns.

    Args:
        engines: of all rows.
        promises: of all rows.
        prompts: of the set that was tuned on.
        config: of the measurement.
        stop: when an answer ends.
    """
    order = sorted(promises, key=lambda name: -promises[name].rate)
    others = [name for name in order if name not in (TUNED, DYNAMIC)]
    names = [TUNED, DYNAMIC, *others[: FINALISTS - 2]]
    return measure({name: engines[name] for name in names}, prompts, config, stop=stop)


def chosen_row(trial: Measurement) -> str:
    """The tuned static tree, unless others are clearly faster: then the fastest of those."""
    found = {name: compare(rows, trial.rows[TUNED]) for name, rows in trial.rows.items()}
    clearly = {name: c.speedup.ratio for name, c in found.items() if c.faster}
    return max(clearly, key=lambda name: clearly[name], default=TUNED)


def rates(trial: Measurement) -> dict[str, float]:
    """Tokens a second of every row of the trial."""
    summaries = metrics.summaries(trial.rows, trial.lossless)
    return {name: found.tokens_per_second for name, found in summaries.items()}
