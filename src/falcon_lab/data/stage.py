"""The data stage of a run: packed batches, and the teacher's features where they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.target import NOT_STORED, layers_of

if TYPE_CHECKING:
    from falcon_lab.run import Run


def prepare_data(current: Run) -> FalconDataModule:
    """Read and pack the corpus; fill the feature store that the experiment may name."""
    data = FalconDataModule.for_target(current.experiment.data, current.target)
    if current.training_done:
        return data  # nothing will be read of it
    if current.experiment.data.feature_store is not None:
        refuse_taps(current)
    rows = data.train_rows
    tokens = round(len(rows) * rows.length * rows.filled)
    current.announce(
        f"{current.experiment.data.corpus}: {tokens:,} training tokens, packed into "
        f"{len(rows):,} sequences of {rows.length} ({rows.filled:.0%} filled)"
    )
    data.build_features(current.target, current.announce)
    return data


def refuse_taps(current: Run) -> None:
    """A feature store is of no use to a drafter that taps layers: say so before it is filled.

    Raises:
        FalconLabError: the experiment's drafter taps layers.
    """
    context = BuildContext(host=current.target)
    if layers_of(current.components.build("drafter", current.experiment.drafter, context)):
        raise FalconLabError(NOT_STORED)
