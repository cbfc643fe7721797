"""Check the ``trainer:`` section against the installed Lightning, without importing it.

Importing Lightning takes seconds; reading the signature in its source takes milliseconds, and is
always in step with the version that is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean
from falcon_lab.fields import Range

if TYPE_CHECKING:
    from falcon_lab.config.schema import Experiment

RESERVED = {
    "logger": "Weights & Biases is set up by the wandb section",
    "callbacks": "checkpoints and progress are set up by the distillation section",
    "default_root_dir": "use out=FOLDER",
}
"""Arguments of the Trainer that an experiment sets itself, and what to use instead."""

STEPS = 1000
"""Optimiser steps of a training where ``trainer.max_steps`` is left out."""

MANY = 2**31
"""More steps, epochs or batches than any training has."""

RANGES = {
    "max_steps": Range(least=1, most=MANY),
    "min_steps": Range(least=0, most=MANY),
    "max_epochs": Range(least=-1, most=MANY),
    "min_epochs": Range(least=0, most=MANY),
    "accumulate_grad_batches": Range(least=1, most=MANY),
    "gradient_clip_val": Range(least=0),
    "limit_train_batches": Range(above=0),
    "limit_val_batches": Range(least=0),
    "overfit_batches": Range(least=0),
    "val_check_interval": Range(above=0),
    "check_val_every_n_epoch": Range(least=1),
    "num_sanity_val_steps": Range(least=-1),
    "log_every_n_steps": Range(least=0),
    "num_nodes": Range(least=1),
}
"""What Lightning takes as it is and trains nothing with, or something else than was meant."""

MODEL_PARALLEL = "model_parallel"
"""Strategy by which the processes of a training share the target."""
SIZES = ("data_parallel_size", "tensor_parallel_size")
"""Of the grid of these processes, beside the strategy's name."""
DRAFTER, HELD = "drafter", ("replicated", "sharded")
"""How these processes hold the drafter and its optimiser; the first is the default."""

ADVICE = {
    "max_steps": "the learning rate follows it, so it is never without limit; max_epochs and "
    "max_time may end a training before",
    "max_epochs": "-1 leaves the end to max_steps",
    "limit_train_batches": "to train nothing, leave the stage distil out",
}
"""Argument -> what to do in place of a value beyond its range."""

SCALARS = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}


def check_trainer(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section, with 4.0 made 4 where Lightning wants an int.

    Raises:
        ConfigError: an argument that the installed Trainer does not have, that an experiment sets
            itself, of a type that Lightning does not take, or of a value that trains nothing.
    """
    annotations = trainer_annotations()
    known = [name for name in annotations if name not in RESERVED]
    for name in section:
        if name in RESERVED:
            raise ConfigError(f"trainer.{name}", f"is set by the run; {RESERVED[name]}")
        if name not in annotations:
            suggestion = did_you_mean(str(name), known)
            raise ConfigError(
                f"trainer.{name}", f"is no argument of Lightning's Trainer{suggestion}"
            )
    if isinstance(section.get("strategy"), Mapping):
        model_parallel(section)
    checked = {
        name: value
        if isinstance(value, Mapping) and name == "strategy"
        else _fit(value, annotations[name], name)
        for name, value in section.items()
    }
    for name, value in checked.items():
        if problem := _refusal(name, value):
            raise ConfigError(f"trainer.{name}", problem)
    return checked


def model_parallel(section: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of the processes that share the target; None: they do not.

    Raises:
        ConfigError: a strategy with options is another, or an option is none.
    """
    strategy = section.get("strategy")
    if strategy == MODEL_PARALLEL:
        return {}
    if not isinstance(strategy, Mapping):
        return None
    if (name := strategy.get("name")) != MODEL_PARALLEL:
        raise ConfigError(
            "trainer.strategy.name", f"is {name!r}; only {MODEL_PARALLEL} has options here"
        )
    sizes = {key: value for key, value in strategy.items() if key != "name"}
    held = sizes.pop(DRAFTER, HELD[0])
    if held not in HELD:
        raise ConfigError(f"trainer.strategy.{DRAFTER}", f"is {held!r}; choose {' or '.join(HELD)}")
    for key, value in sizes.items():
        if key not in SIZES:
            known = [*SIZES, DRAFTER]
            raise ConfigError(
                f"trainer.strategy.{key}",
                f"is no option of {MODEL_PARALLEL}{did_you_mean(str(key), known)}",
            )
        if type(value) is not int or not 1 <= value <= MANY:
            raise ConfigError(
                f"trainer.strategy.{key}", f"is {value!r}; give a number of processes"
            )
    if held == HELD[0]:
        return sizes
    if sizes.get("tensor_parallel_size", 1) != 1:
        raise ConfigError(
            f"trainer.strategy.{DRAFTER}",
            "is sharded over processes that have batches of their own; set tensor_parallel_size=1",
        )
    return {**sizes, DRAFTER: held}


def training_steps(section: Mapping[str, Any]) -> int:
    """Return the optimiser steps that a training takes at the most."""
    return int(section.get("max_steps", STEPS))


def training_tokens(experiment: Experiment) -> int:
    """Return the tokens of the target's passes in all steps of a training on one device."""
    batches = int(experiment.trainer.get("accumulate_grad_batches", 1) or 1)
    data = experiment.data
    return training_steps(experiment.trainer) * batches * data.batch_size * data.length


def epoch_batches(section: Mapping[str, Any]) -> int | None:
    """Return the batches of what Lightning calls an epoch; None where the data decide.

    Where steps govern, an epoch is the whole training.
    """
    if section.get("max_epochs") not in (None, -1):
        return None
    return training_steps(section) * int(section.get("accumulate_grad_batches", 1))


def _digits(time: Any) -> str:
    """Return the numbers of ``max_time``; what says no time is left to Lightning."""
    return "1" if time is None else str(list(time.values()) if isinstance(time, dict) else time)


def _refusal(name: str, value: Any) -> str | None:
    """Return what is wrong with the value of an argument, or None."""
    if name == "fast_dev_run" and value:
        return "leaves a drafter that learnt nothing where a trained one belongs; use max_steps=1"
    if name == "max_epochs" and value == 0:
        return "is 0, which trains nothing; leave the stage distil out"
    if name == "max_time" and not re.search(r"[1-9]", _digits(value)):
        return f"is {value!r}, which trains nothing; give it a time, as in 00:01:30:00"
    if name == "deterministic" and value not in (None, True, False, "warn"):
        return f"is {value!r}; write true, false or warn"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name not in RANGES or not number or not (problem := RANGES[name].refusal(value)):
        return None
    return "; ".join(filter(None, [problem, ADVICE.get(name)]))


def trainer_annotations() -> dict[str, ast.expr | None]:
    """Return name -> annotation of every argument of ``lightning.Trainer``, from its source."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        raise FalconLabError("lightning is not installed; pip install 'lightning>=2.6.4,<3'")
    return _annotations(Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py")


@cache
def _annotations(path: Path) -> dict[str, ast.expr | None]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = [*method.args.args[1:], *method.args.kwonlyargs]
                    return {argument.arg: argument.annotation for argument in arguments}
    raise FalconLabError(f"{path} defines no Trainer; pip install 'lightning>=2.6.4,<3'")


def _fit(value: Any, annotation: ast.expr | None, name: str) -> Any:
    if annotation is None:
        return value
    words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if value is None and "Optional" not in words:
        raise ConfigError(f"trainer.{name}", "is empty; give it a value or take the line out")
    if value is None or any(
        word.startswith("_") for word in words
    ):  # an alias of Lightning's: leave it to it
        return value
    allowed = {SCALARS[word] for word in words if word in SCALARS}
    if type(value) is float and int in allowed and float not in allowed and value.is_integer():
        return int(value)
    if type(value) is int and float in allowed:
        return value
    if type(value) not in allowed:
        wanted = " or ".join(sorted(kind.__name__ for kind in allowed))
        raise ConfigError(f"trainer.{name}", f"is {value!r}; Lightning wants {wanted}")
    return value
