from __future__ import annotations

import inspect

from falcon_lab import hookimpl
from falcon_lab.plugins.discovery import hooks as hookspecs
from falcon_lab.plugins.hooks import PROJECT, Register

HOOKS = {"register_components"}
KINDS = {
    "target",
    "tuner",
    "drafter",
    "schedule",
    "tree_builder",
    "template",
    "acceptance_rule",
    "controller",
    "objective",
    "engine",
}
BROUGHT = {"saved_drafter", "corpus"}
"""Kinds that are files."""


def public(owner: object) -> dict[str, object]:
    members = inspect.getmembers(owner, inspect.isfunction)
    return {name: member for name, member in members if not name.startswith("_")}


def test_the_hooks_are_these_and_are_documented() -> None:
    """A hook is forever: this list grows with a new kind of plug-in, and never shrinks."""
    marked = {
        name: member
        for name, member in public(hookspecs).items()
        if hasattr(member, f"{PROJECT}_spec")
    }
    assert set(marked) == HOOKS
    assert all(inspect.getdoc(member) for member in marked.values())


def test_register_has_these_methods_and_each_is_documented() -> None:
    methods = public(Register)
    assert set(methods) == KINDS | BROUGHT
    assert all(inspect.getdoc(method) for method in methods.values())


def test_every_method_of_register_takes_the_same_arguments() -> None:
    signatures = {name: str(inspect.signature(add)) for name, add in public(Register).items()}
    common = "(self, name: 'str', build: 'Builder', *, config: 'type | None' = None{}) -> 'None'"
    formats = ", exports: 'Mapping[str, Builder] | None' = None, imports: 'Builder | None' = None"
    assert {signatures[name] for name in KINDS - {"drafter", "target"}} == {common.format("")}
    assert signatures["drafter"] == common.format(formats)
    assert signatures["target"] == common.format(", published: 'str | None' = None")
    assert {signatures[name] for name in BROUGHT} == {
        "(self, name: 'str', path: 'Path | str') -> 'None'"
    }


def test_the_marker_that_plug_ins_import_is_the_projects() -> None:
    @hookimpl
    def register_components(register: Register) -> None: ...

    assert hasattr(register_components, f"{PROJECT}_impl")
