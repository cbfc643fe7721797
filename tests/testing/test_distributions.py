"""Distributions as they should be, and what is found to be wrong with others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from falcon_lab.plugins.discovery import load_components
from falcon_lab.testing import ContractError, check_distribution, components_of
from falcon_lab.testing.distributions import heavy_imports, missing_from_readme, registered

PROJECT = """
[project]
name = "falcon-lab-made-up"
version = "0.7"
[project.entry-points.falcon_lab]
made-up = "made_up"
"""
PACKAGE = """
from dataclasses import dataclass, field
from falcon_lab import hookimpl

@dataclass
class Config:
    width: int
    taps: list = field(default_factory=list)
    kind: str = "own"

@hookimpl
def register_components(register):
    register.drafter("made-up", "made_up.drafter:Drafter", config=Config)
    register.template("wide", "made_up.tree:wide")
"""
README = """
A drafter `made-up` and a template `wide`.

| option | default | meaning |
|---|---|---|
| `width` | ??? | of it |
| `taps`  |  []  | layers |
| `kind` | `own` | or another |
"""

Change = Callable[[str], str]


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "made_up.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    yield tmp_path
    sys.modules.pop("made_up", None)


def test_what_it_registers_is_found_as_if_it_were_installed(made_up: Path) -> None:
    check_distribution(made_up)
    own = registered(made_up)
    assert [(one.name, one.distribution, one.version) for one in own] == [
        ("made-up", "falcon-lab-made-up", "0.7"),
        ("wide", "falcon-lab-made-up", "0.7"),
    ]
    known = components_of(made_up)
    assert known.find("drafter", "made-up") == own[0]
    assert len(known.components) == len(load_components().components) + 2


def test_it_takes_the_place_of_the_installed_one(
    made_up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = components_of(made_up)
    monkeypatch.setattr("falcon_lab.testing.distributions.load_components", lambda: there)
    assert components_of(made_up).components == there.components


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("pyproject.toml", "[project.entry-points.falcon_lab]", "[x]", "expected some, found none"),
        ("made_up.py", "from dataclasses", "import torch\nfrom dataclasses", "found torch; "),
        ("README.md", "`width` | ???", "`width` | 3", r"found no \| `width` \| \?\?\? \|; say"),
        ("README.md", "`wide`", "wide-open", "found no wide; "),
        ("README.md", "| `taps`", "`taps`", r"found no \| `taps` \| \[\] \|; "),
    ],
)
def test_what_is_wrong_is_said(
    made_up: Path, file: str, before: str, after: str, said: str
) -> None:
    path = made_up / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ContractError, match=f"distribution 'falcon-lab-made-up': .*{said}"):
        check_distribution(made_up)


def test_the_parts_of_the_check_give_what_they_find(made_up: Path) -> None:
    assert (heavy_imports(made_up), missing_from_readme(made_up)) == ([], [])
    (made_up / "README.md").write_text("")
    rows = ["| `width` | ??? |", "| `taps` | [] |", "| `kind` | own |"]
    assert missing_from_readme(made_up) == ["made-up", *rows, "wide"]
