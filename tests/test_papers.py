"""``docs/papers.md`` names files and tests that exist."""

from __future__ import annotations

import re

import pytest

from everything import everything
from falcon_lab.plugins.registry import Component
from running import ROOT

TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
LABELS = ["File", "Test", "Measured", "Reported", "Deviations"]
NAMED = re.compile(r"`((?:src|tests|plugins|experiments|benchmarks|docs)/[\w./-]+)(?:::(\w+))?`")


def part(section: str, label: str) -> str:
    found = re.search(rf"^- \*\*{label}\*\*:(.*?)(?=^- \*\*|\Z)", section, re.MULTILINE | re.DOTALL)
    assert found is not None, label
    return found[1]


@pytest.mark.parametrize("name", list(SECTIONS))
def test_a_method_has_every_part_in_order_and_names_a_file_and_a_test(name: str) -> None:
    section = SECTIONS[name]
    assert re.findall(r"^- \*\*(\w+)\*\*:", section, re.MULTILINE) == LABELS
    assert all(part(section, label).strip() for label in LABELS)
    files = [path for path, _ in NAMED.findall(part(section, "File"))]
    tests = [path for path, _ in NAMED.findall(part(section, "Test"))]
    assert files
    assert all("/src/" in f"/{path}" for path in files)
    assert tests
    assert all(path.rpartition("/")[2].startswith("test_") for path in tests)


@pytest.mark.parametrize(("path", "test"), sorted(set(NAMED.findall(TEXT))))
def test_every_file_and_test_that_is_named_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    if test:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def built_in(component: Component) -> str:
    """The file, from the repository's root, that a component is built in.

    The package may be installed elsewhere, as a wheel.
    """
    assert isinstance(component.build, str)
    module = component.build.partition(":")[0].replace(".", "/")
    found = [p for source in ("src", "plugins/*/src") for p in ROOT.glob(f"{source}/{module}.py")]
    assert len(found) == 1
    return found[0].relative_to(ROOT).as_posix()


PUBLISHED = ("drafter", "schedule", "objective", "tree_builder", "acceptance_rule")
"""Kinds whose components are methods of papers."""


@pytest.mark.parametrize(
    "component",
    [c for c in everything().components if c.kind in PUBLISHED],
    ids=lambda component: f"{component.kind} {component.name}",
)
def test_every_method_that_ships_is_there(component: Component) -> None:
    files = {path for text in SECTIONS.values() for path, _ in NAMED.findall(part(text, "File"))}
    assert built_in(component) in files
