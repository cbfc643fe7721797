"""The data stage of a run: packed batches, and the teacher's features where they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from falcon_lab.config.schema import DataConfig
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, ComponentBuilder
from falcon_lab.model.target import NOT_STORED

if TYPE_CHECKING:
    from falcon_lab.model.target import Target


def prepare_data(
    config: DataConfig,
    target: Target,
    *,
    drafter: Mapping[str, Any],
    components: ComponentBuilder,
    announce: Callable[[str], None],
) -> FalconDataModule:
    """Read and pack the corpus; fill the feature store that the configuration may name.

    Args:
        config: the ``data`` section.
        target: the frozen teacher.
        drafter: the YAML node of the drafter that is to be trained on it.
        components: builds that drafter.
        announce: takes one line for the user.

    Raises:
        FalconLabError: the corpus cannot be read, or a feature store is named and the drafter
            reads hidden states of layers, which no store keeps.
    """
    data = FalconDataModule.for_target(config, target)
    if config.feature_store is not None:
        built = components.build("drafter", drafter, BuildContext(host=target))
        if built.taps:
            raise FalconLabError(NOT_STORED)
    rows = data.train_rows
    tokens = round(len(rows) * rows.length * rows.filled)
    announce(
        f"{config.corpus}: {tokens:,} training tokens, packed into "
        f"{len(rows):,} sequences of {rows.length} ({rows.filled:.0%} filled)"
    )
    data.build_features(target, announce)
    return data
