"""Writes the distribution of a plug-in that works as it is, for its author to change."""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from falcon_lab import __version__
from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, make_folder
from falcon_lab.plugins.registry import Components

DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""What pip accepts as a name (the packaging user guide, "Names and normalization")."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs from one kind of component to the other.

    Attributes:
        kind: as ``components.KINDS`` has it.
        check: of ``falcon_lab.testing``.
        what: the component in words.
        yaml: where it stands in an experiment.
    """

    kind: str
    check: str
    what: str
    yaml: str


KINDS: dict[str, Kind] = {
    "drafter": Kind(
        "drafter",
        "check_drafter",
        "A recurrent drafter head",
        "drafter: {name: $name}\nglancing: {name: none}",
    ),
    "schedule": Kind(
        "schedule", "check_schedule", "A glancing schedule", "glancing: {name: $name}"
    ),
    "tree-builder": Kind(
        "tree_builder", "check_tree_builder", "A tree builder", "tree: {name: $name}"
    ),
    "acceptance": Kind(
        "acceptance_rule", "check_acceptance", "An acceptance rule", "acceptance: {name: $name}"
    ),
    "controller": Kind(
        "controller",
        "check_controller",
        "A draft-length controller",
        "controller: {name: $name}\ntree: {name: chain, depth: 12}",
    ),
    "objective": Kind(
        "objective", "check_objective", "A distillation objective", "objective: {name: $name}"
    ),
    "target": Kind("target", "check_target", "A target", "target: {name: $name}"),
    "tuner": Kind("tuner", "check_tuner", "A tuner of targets", "target: {tune: {name: $name}}"),
}


def write_plugin(name: str, kind: str, into: Path, components: Components) -> Path:
    """Write an installable distribution with one component of its name.

    Args:
        name: of the distribution, and of the component in a YAML.
        kind: a key of ``KINDS``.
        into: the folder that it becomes a folder of.
        components: what is registered already.

    Returns:
        The distribution's folder.

    Raises:
        FalconLabError: the name is none that pip and Python take, or it is taken; or nothing can
            be written there.
    """
    package = package_of(name)
    described = KINDS[kind]
    for known in components.components:
        if (known.kind, known.name) == (described.kind, name):
            raise FalconLabError(
                f"a component {name!r} of kind {described.kind} comes with {known.distribution} "
                f"{known.version} already; choose another name"
            )
    folder = into / name
    if folder.exists():
        raise FalconLabError(f"{folder} is there already; choose another name or --into")
    texts = rendered(name, package, kind)
    make_folder(into)
    with about(folder), TemporaryDirectory(dir=into, prefix=".new-plugin-") as place:
        whole = Path(place) / name
        for path, text in texts.items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_text(text, encoding="utf-8")
        whole.rename(folder)
    return folder


def package_of(name: str) -> str:
    """Return the import package of a distribution.

    Raises:
        FalconLabError: pip or Python does not take the name.
    """
    if not DISTRIBUTION.fullmatch(name):
        raise FalconLabError(
            f"{name!r} is no name of a distribution: use letters, digits, '-', '_' and '.', the "
            "first and the last a letter or a digit"
        )
    package = re.sub(r"[-_.]+", "_", name).lower()
    if not package.isidentifier() or keyword.iskeyword(package):
        raise FalconLabError(
            f"{name!r} makes {package!r} of itself in Python, which cannot be imported; begin with "
            "a letter, and take no word of the language"
        )
    taken = {*sys.stdlib_module_names, *dir(builtins), "falcon_lab", "tests", "torch", "lightning"}
    if package in taken:
        raise FalconLabError(f"{name!r} would hide Python's own or another {package!r}; change it")
    return package


def rendered(name: str, package: str, kind: str) -> dict[str, str]:
    """Return the text of every file of the distribution, by its path."""
    described = KINDS[kind]
    module = described.kind
    values = {
        "name": name,
        "package": package,
        "module": module,
        "check": described.check,
        "what": described.what,
        "release": ".".join(__version__.split(".")[:2]),
        "yaml": Template(described.yaml).substitute(name=name),
    }
    sources = {
        "pyproject.toml": "pyproject.toml.in",
        "README.md": "README.md.in",
        f"src/{package}/__init__.py": f"{kind}/__init__.py.in",
        f"src/{package}/{module}.py": f"{kind}/{module}.py.in",
        f"tests/test_{package}.py": "test.py.in",
    }
    templates = files("falcon_lab.scaffolding") / "templates"
    texts = {
        path: Template((templates / source).read_text(encoding="utf-8")).substitute(values)
        for path, source in sources.items()
    }
    return texts | {f"src/{package}/py.typed": ""}
