"""Imports point one way: down the list of ``docs/architecture.md``, and never in a circle.

Imports inside functions and for type checking count. A string such as ``"module:name"``, by which
the built-ins and plug-ins name what is imported when it is used, does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from running import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = [ROOT / "src", *sorted(ROOT.glob("plugins/*/src"))]


def modules(folder: Path) -> dict[str, Path]:
    """Name of a module -> its file, of all below a folder of sources."""
    files = {".".join(p.relative_to(folder).with_suffix("").parts): p for p in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


MODULES = {name: path for folder in FOLDERS for name, path in modules(folder).items()}


def imports(path: Path, known: Mapping[str, object]) -> Iterator[str]:
    """The known modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & set(known)
            if node.module in known and inner - set(known):
                yield node.module


GRAPH = {name: set(imports(path, MODULES)) - {name} for name, path in MODULES.items()}


def package(module: str) -> str:
    """``drafters`` of ``falcon_lab.drafters.falcon``; a plug-in is a package of its own.

    ``falcon_lab`` itself is what a plug-in begins from: ``hookimpl``.
    """
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] or "plugins" if first == "falcon_lab" else first


def section(title: str) -> str:
    """The text below a heading."""
    return TEXT.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def levels() -> dict[str, int]:
    """Package -> its place in the list: the lower the number, the more may import it."""
    listed = re.findall(r"^    (\w.*?)(?:  .*)?$", section("Which way imports point"), re.M)
    lines = [re.split(r",\s*", line) for line in reversed(listed)]
    return {name: level for level, line in enumerate(lines) for name in line}


def public() -> set[str]:
    """What ``docs/architecture.md`` lets a plug-in import."""
    table = section("What a plug-in may import")
    names = re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\|([^|]*)\|", table, re.M)))
    return {f"falcon_lab.{name}".removesuffix(".hookimpl") for name in names}


def has_circle(graph: Mapping[str, set[str]]) -> bool:
    """Whether some path of imports comes back."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def arrows_up(graph: Mapping[str, set[str]]) -> set[str]:
    """``lower -> higher`` for every import that runs up, or sideways, in the list."""
    level = levels()
    pairs = {(package(name), package(other)) for name, found in graph.items() for other in found}
    inside = {(one, other) for one, other in pairs if one in level and one != other}
    return {f"{one} -> {other}" for one, other in inside if level[one] <= level[other]}


def test_every_package_has_its_place_in_the_list() -> None:
    ours = {package(name) for name in MODULES if name.startswith("falcon_lab.")}
    assert set(levels()) == ours


def test_imports_run_down_the_list() -> None:
    assert arrows_up(GRAPH) == set()


def test_the_files_of_a_package_import_each_other_in_no_circle() -> None:
    found = set()
    for name in {package(module) for module in GRAPH}:
        own = {m: {o for o in GRAPH[m] if package(o) == name} for m in GRAPH if package(m) == name}
        found |= {name} if has_circle(own) else set()
    assert found == set()


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.parent.name)
def test_a_plug_in_imports_what_is_public_alone(folder: Path) -> None:
    used = {o for m in modules(folder) for o in GRAPH[m] if o.startswith("falcon_lab")}
    assert {o for o in used if o.split(".")[0] == "falcon_lab"} <= public()


def test_every_public_module_exists() -> None:
    assert public() <= set(MODULES)


def test_an_arrow_that_runs_up_and_a_circle_are_found() -> None:
    graph = {"falcon_lab.tree": {"falcon_lab.cli"}, "falcon_lab.cli": {"falcon_lab.tree"}}
    assert arrows_up(graph) == {"tree -> cli"}
    assert has_circle(graph)
    assert not has_circle({"falcon_lab.cli": {"falcon_lab.tree"}})
