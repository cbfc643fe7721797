from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from falcon_lab.config.schema import Experiment
from falcon_lab.errors import ConfigError
from falcon_lab.plugins.discovery import builtins, load_components
from falcon_lab.plugins.registry import KINDS, Component


@pytest.fixture(autouse=True)
def _built_ins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")


def every() -> Iterator[Component]:
    return iter(load_components().components)


def test_every_kind_has_a_built_in_and_all_belong_to_falcon_lab() -> None:
    assert {component.kind for component in every()} == set(KINDS)
    assert {component.distribution for component in every()} == {"falcon-lab"}


def test_every_builder_is_named_by_a_string_that_leads_to_a_definition() -> None:
    """Found without importing: the modules import torch, and listing components must not."""
    for component in every():
        assert isinstance(component.build, str)
        module, name = component.build.split(":")
        path = Path(builtins.__file__).parents[2] / (module.replace(".", "/") + ".py")
        assert path.is_file(), f"{component.full_name}: {path} is missing"
        defined = {getattr(node, "name", None) for node in ast.parse(path.read_text()).body}
        assert name in defined, f"{component.full_name}: {path} has no {name}"


def test_the_defaults_of_every_component_are_accepted() -> None:
    components = load_components()
    for component in components.components:
        node = components.check(component.kind, {"name": component.name}, "node")
        assert components.check(component.kind, node, "node") == node


def test_the_defaults_of_an_experiment_are_built_in() -> None:
    from falcon_lab.config.load import NODES

    components = load_components()
    for name, kind in NODES.items():
        assert components.find(kind, getattr(Experiment(), name)["name"])


@pytest.mark.parametrize(
    ("kind", "node", "problem"),
    [
        ("drafter", {"name": "falcon", "block": 0}, "block must be at least 1, got 0"),
        ("drafter", {"name": "falcon", "lstm_layers": 0}, "layers and lstm_layers must be"),
        ("drafter", {"name": "falcon", "dropout": 1.0}, "dropout must be in [0, 1), got 1.0"),
        ("controller", {"name": "confidence", "threshold": 0}, "threshold must be in (0, 1], got"),
        ("tree_builder", {"name": "chain", "depth": -1}, "depth must be at least 0, got -1"),
        ("tree_builder", {"name": "dynamic", "nodes": -1}, "nodes must be at least 0, got -1"),
        ("tree_builder", {"name": "dynamic", "beam": 0}, "beam must be at least 1, got 0"),
        ("tree_builder", {"name": "dynamic", "width": 0}, "width must be at least 1, got 0"),
        ("tree_builder", {"name": "dynamic", "depth": -1}, "depth must be at least 0, got -1"),
        ("tree_builder", {"name": "optimal", "nodes": -1}, "nodes must be at least 0, got -1"),
        ("tree_builder", {"name": "paths", "nodes": -1}, "nodes must be at least 0, got -1"),
        ("tree_builder", {"name": "paths", "depth": -1}, "depth must be at least 0, got -1"),
        ("tree_builder", {"name": "optimal", "passes": -1}, "passes must be at least 0, got -1"),
        ("drafter", {"name": "falcon", "fuse": "gru"}, "fuse is 'gru'; choose one of lstm,"),
        ("drafter", {"name": "falcon", "query": "old"}, "query is 'old'"),
        ("drafter", {"name": "falcon", "phase": "new"}, "phase is 'new'"),
        ("schedule", {"name": "csgd", "tokens": "x"}, "tokens is 'x'"),
        ("objective", {"name": "falcon", "hard_label": "x"}, "hard_label is 'x'"),
        ("objective", {"name": "falcon", "soft_form": "x"}, "soft_form is 'x'"),
        ("objective", {"name": "falcon", "slot_decay": 0}, "slot_decay must lie in (0, 1]"),
        ("tree_builder", {"name": "chain", "proposal": "x"}, "proposal is 'x'"),
        ("tree_builder", {"name": "static", "proposal": "x"}, "proposal is 'x'"),
    ],
)
def test_words_that_no_option_knows_are_refused(
    kind: str, node: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match="node: ") as caught:
        load_components().check(kind, node, "node")
    assert caught.value.problem.startswith(problem)


def test_every_dataclass_of_options_is_documented_and_registered() -> None:
    defined = {
        value
        for value in vars(builtins).values()
        if inspect.isclass(value) and dataclasses.is_dataclass(value)
    }
    assert defined == {component.config for component in every()} - {None}
    for config in defined:
        assert not (config.__doc__ or "").startswith(f"{config.__name__}("), "the generated one"


def test_the_page_of_built_ins_imports_no_torch() -> None:
    spec = importlib.util.find_spec("falcon_lab.plugins.builtins")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= {"__future__", "dataclasses", "typing", "falcon_lab.plugins.hooks"}
