"""The data stage of a run: packed batches, and the teacher's features where they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from falcon_lab.data.datamodule import FalconDataModule

if TYPE_CHECKING:
    from falcon_lab.run import Run


def prepare_data(current: Run) -> FalconDataModule:
    """Read and pack the corpus; fill the feature store that the experiment may name."""
    data = FalconDataModule.for_target(current.experiment.data, current.target)
    if current.training_done:
        return data  # nothing will be read of it
    rows = data.train_rows
    tokens = round(len(rows) * rows.length * rows.filled)
    current.announce(
        f"{current.experiment.data.corpus}: {tokens:,} training tokens, packed into "
        f"{len(rows):,} sequences of {rows.length} ({rows.filled:.0%} filled)"
    )
    data.build_features(current.target, current.announce)
    return data
