"""Lightning's Trainer: the one place where it is made, and its refusals before all else.

Lightning looks at some arguments when the Trainer is made and at others when a training begins.
Both can be had without a training: ``check_arguments`` makes the Trainer and has it begin one of
nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn

from falcon_lab.config.trainer import MANY, model_parallel
from falcon_lab.errors import ConfigError, one_line

DEFAULTS = {"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 10}
"""Defaults that differ from Lightning's; ``trainer:`` overrides them."""

HERE = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "precision": None,
    "plugins": None,
    "sync_batchnorm": False,
    "profiler": None,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments with which nothing is started, moved or written when a training begins."""


def make_trainer(
    arguments: Mapping[str, Any],
    folder: Path,
    *,
    logger: Any = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return a Trainer, which has not begun anything.

    Args:
        arguments: the ``trainer`` section.
        folder: of the run.
        logger: Lightning loggers, or None.
        callbacks: beside those that the arguments ask for.

    Raises:
        ConfigError: Lightning refuses an argument.
    """
    given = {**DEFAULTS, **arguments}
    make = partial(
        _trainer,
        default_root_dir=folder,
        logger=False if logger is None else logger,
        callbacks=list(callbacks),
    )
    try:
        return make(**given)
    except Exception as error:  # whatever Lightning, and what it imports for an argument, raise
        raise _refused(error, arguments, lambda rest: make(**{**DEFAULTS, **rest})) from error


def _trainer(**arguments: Any) -> Trainer:
    """Make a Trainer; the strategy of a target that processes share is ours."""
    if (sizes := model_parallel(arguments)) is not None:
        from falcon_lab.model_parallel import SharedTarget

        arguments["strategy"] = SharedTarget(**sizes)
    return Trainer(**arguments)


def check_arguments(
    arguments: Mapping[str, Any], folder: Path, *, batches: int | None, validation: int
) -> None:
    """Have Lightning look at every argument; nothing is trained or written.

    Args:
        arguments: the ``trainer`` section.
        folder: of the run, which need not be there.
        batches: of an epoch; None where the data decide and are not there yet.
        validation: batches of a validation.

    Raises:
        ConfigError: it refuses one.
    """
    with _silence():
        make_trainer(arguments, folder, callbacks=[Checkpoint()])
        length = MANY if batches is None else batches  # as many as anything may ask for
        begin = partial(_begin, folder=folder, batches=length, validation=validation)
        try:
            begin(arguments)
        except Exception as error:  # as above
            raise _refused(error, arguments, begin) from error


def _refused(
    error: Exception, arguments: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], object]
) -> ConfigError:
    """Return the error with the key of the argument without which there would be none."""
    message = one_line(error)
    named_first = sorted(arguments, key=lambda name: name not in message)
    for name in named_first:
        rest = {other: value for other, value in arguments.items() if other != name}
        try:
            attempt(rest)
        except Exception:  # another argument is at fault, or several are
            continue
        problem = f"is {arguments[name]!r}, which Lightning refuses: {message}; choose another"
        return ConfigError(f"trainer.{name}", problem)
    return ConfigError("trainer", f"Lightning refuses it: {message}")


def _begin(arguments: Mapping[str, Any], *, folder: Path, batches: int, validation: int) -> None:
    """Begin a training of nothing, up to where its first step would be."""
    trainer = make_trainer({**arguments, **HERE}, folder, callbacks=[Checkpoint()])
    with suppress(_Begun):
        trainer.fit(_Nothing(), _Batches(batches), _Batches(validation))


class _Begun(Exception):
    """All arguments have been looked at."""


class _Nothing(LightningModule):
    """Trains nothing: it leaves before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def on_train_start(self) -> None:
        raise _Begun

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise _Begun

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Batches:
    """Batches that are only counted."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.zeros(1) for _ in range(self.length))


@contextmanager
def _silence() -> Iterator[None]:
    """Silence what Lightning says again when the training really begins."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
