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
from falcon_lab.plugins.hooks import BROUGHT, KINDS, Component


@pytest.fixture(autouse=True)
def _built_ins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")


def every() -> Iterator[Component]:
    return iter(load_components().components)


def test_every_kind_that_is_built_has_a_built_in_and_all_belong_to_falcon_lab() -> None:
    # Engines stand beside plain and speculative decoding, which no name asks for; a target needs
    # no tuner.
    assert {component.kind for component in every()} == set(KINDS) - {*BROUGHT, "engine", "tuner"}
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
    ("kind", "name", "option", "value"),
    [
        ("drafter", "falcon", "block", 0),
        ("drafter", "falcon", "layers", 0),
        ("drafter", "falcon", "lstm_layers", 0),
        ("drafter", "falcon", "dropout", 1.0),
        ("drafter", "falcon", "fuse", "gru"),
        ("drafter", "falcon", "query", "old"),
        ("drafter", "falcon", "phase", "new"),
        ("schedule", "csgd", "tokens", "x"),
        ("schedule", "csgd", "start", 1.1),
        ("schedule", "random", "end", -0.1),
        ("objective", "falcon", "hard_label", "x"),
        ("objective", "falcon", "soft_form", "x"),
        ("objective", "falcon", "temperature", 0),
        ("objective", "falcon", "slot_decay", 0),
        ("tree_builder", "chain", "depth", -1),
        ("tree_builder", "chain", "proposal", "x"),
        ("tree_builder", "static", "proposal", "x"),
        ("tree_builder", "static", "max_depth", -1),
        ("tree_builder", "dynamic", "nodes", -1),
        ("tree_builder", "dynamic", "beam", 0),
        ("tree_builder", "dynamic", "width", 0),
        ("tree_builder", "dynamic", "depth", -1),
        ("tree_builder", "optimal", "nodes", -1),
        ("tree_builder", "optimal", "passes", -1),
        ("tree_builder", "paths", "nodes", -1),
        ("tree_builder", "paths", "depth", -1),
        ("controller", "fixed", "depth", -1),
        ("controller", "confidence", "threshold", 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_full_key(
    kind: str, name: str, option: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_components().check(kind, {"name": name, option: value}, "node")
    assert caught.value.key == f"node.{option}"
    assert caught.value.problem.startswith(f"is {value!r}".removesuffix(".0"))


def test_every_dataclass_of_options_is_documented_and_registered() -> None:
    defined = {
        value
        for value in vars(builtins).values()
        if inspect.isclass(value) and value.__module__ == builtins.__name__
        if dataclasses.is_dataclass(value)
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
    ours = {"falcon_lab.fields", "falcon_lab.plugins.hooks"}
    assert imported <= {"__future__", "dataclasses", "typing", *ours}
