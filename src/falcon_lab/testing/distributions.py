"""A plug-in's distribution: what its folder registers, and what it owes those who install it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from falcon_lab.plugins.discovery import load_components, registered_by
from falcon_lab.plugins.hooks import PROJECT, Component
from falcon_lab.plugins.registry import Components
from falcon_lab.testing.tested import expect

HEAVY = ("torch", "transformers", "lightning")
"""What listing plug-ins must not import."""


def check_distribution(folder: Path | str) -> None:
    """Check that a plug-in's distribution is as users expect one.

    - Its entry points lead to modules with the hook, which register components.
    - Importing these modules imports none of ``HEAVY``: they are imported whenever plug-ins are
      listed.
    - Its README names every component, and every option in a table: name, default, meaning.

    Args:
        folder: with ``pyproject.toml`` and ``README.md``; its modules can be imported.

    Raises:
        ContractError: it is not.
    """
    what = f"distribution {_project(folder)['name']!r}"
    expect(
        registered(folder),
        f"{what}: components that it registers",
        expected="some",
        found="none",
        fix=f'name the module with the hook in [project.entry-points."{PROJECT}"]',
    )
    expect(
        not (heavy := heavy_imports(folder)),
        f"{what}: what importing it imports",
        expected=f"none of {', '.join(HEAVY)}",
        found=", ".join(heavy),
        fix="register builders as 'module:name', and import torch in their modules alone",
    )
    expect(
        not (missing := missing_from_readme(folder)),
        f"{what}: its README",
        expected="every component, and a row of every option",
        found="no " + ", no ".join(missing),
        fix="say what users can set",
    )


def components_of(folder: Path | str) -> Components:
    """Return the registry as if the distribution were installed, in place of an installed one.

    Args:
        folder: as for ``check_distribution``.
    """
    own, name = registered(folder), _project(folder)["name"]
    others = [one for one in load_components().components if one.distribution != name]
    return Components([*others, *own])


def registered(folder: Path | str) -> list[Component]:
    """Return what the distribution's entry points register, in their order."""
    project = _project(folder)
    name, version = project["name"], project.get("version", "0")
    modules = [point.load() for point in _entry_points(project)]
    return [one for module in modules for one in registered_by(module, name, version)]


def heavy_imports(folder: Path | str) -> list[str]:
    """Return which of ``HEAVY`` a fresh interpreter imports with the distribution's modules."""
    modules = ", ".join(["sys", *(point.module for point in _entry_points(_project(folder)))])
    code = f"import {modules}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def missing_from_readme(folder: Path | str) -> list[str]:
    """Return what the README does not say of the distribution's components.

    Returns:
        The name of a component that it does not mention, and the beginning "| `option` | default |"
        of a row that no table has.
    """
    text = (Path(folder) / "README.md").read_text("utf-8")
    rows = {re.sub(r"\s+", " ", line.replace("`", "")) for line in text.splitlines()}
    missing = []
    for about in Components(registered(folder)).listing():
        if not re.search(rf"(?<![\w-]){re.escape(about['name'])}(?![\w-])", text):
            missing.append(about["name"])
        for option, default in about["options"].items():
            if not any(row.startswith(f"| {option} | {default} |") for row in rows):
                missing.append(f"| `{option}` | {default} |")
    return missing


def _project(folder: Path | str) -> dict[str, Any]:
    text = (Path(folder) / "pyproject.toml").read_text("utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def _entry_points(project: dict[str, Any]) -> list[EntryPoint]:
    points = project.get("entry-points", {}).get(PROJECT, {})
    return [EntryPoint(name, value, PROJECT) for name, value in points.items()]
