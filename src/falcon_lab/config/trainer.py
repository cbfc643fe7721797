"""Check the ``trainer:`` section against the installed Lightning, without importing it.

Importing Lightning takes seconds; reading the signature in its source takes milliseconds, and is
always in step with the version that is installed.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean

RESERVED = {
    "logger": "Weights & Biases is set up by the wandb section",
    "callbacks": "checkpoints and progress are set up by the distillation section",
    "default_root_dir": "use out=FOLDER",
}
"""Arguments of the Trainer that an experiment sets itself, and what to use instead."""

SCALARS = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}


def check_trainer(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section, with 4.0 made 4 where Lightning wants an int.

    Raises:
        ConfigError: an argument that the installed Trainer does not have, that an experiment sets
            itself, or of a type that Lightning does not take.
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
    return {name: _fit(value, annotations[name], name) for name, value in section.items()}


def trainer_annotations() -> dict[str, ast.expr | None]:
    """Return name -> annotation of every argument of ``lightning.Trainer``, from its source."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        raise FalconLabError("lightning is not installed; pip install 'lightning>=2.6.4,<3'")
    path = Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = [*method.args.args[1:], *method.args.kwonlyargs]
                    return {argument.arg: argument.annotation for argument in arguments}
    raise FalconLabError(f"{path} defines no Trainer; pip install 'lightning>=2.6.4,<3'")


def _fit(value: Any, annotation: ast.expr | None, name: str) -> Any:
    if annotation is None or value is None:
        return value
    words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if any(word.startswith("_") for word in words):  # an alias of Lightning's: leave it to it
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
