"""Overrides, ``key=value`` in every style that people and sweeps write, and where a key was set."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import ConfigError
from falcon_lab.fields import literal, parse_value, read_yaml
from falcon_lab.stored import read_json


@dataclass(frozen=True)
class Override:
    """One ``key=value``.

    Attributes:
        key: full dotted key.
        value: plain value.
        label: its name in errors.
    """

    key: str
    value: Any
    label: str

    def covers(self, key: str) -> bool:
        """Return whether it set ``key``, or all around it."""
        return key.partition("[")[0] == self.key or key.startswith(f"{self.key}.")


def plain_overrides(values: Mapping[str, Any], source: str) -> list[Override]:
    """Return the values of a file that somebody else wrote: nothing in them is interpolated.

    Args:
        values: full dotted key -> plain value.
        source: the file, for errors.
    """
    return [Override(key, literal(value), source) for key, value in values.items()]


def parse_overrides(texts: Iterable[str | Override], *, label: str = "override") -> list[Override]:
    """Read ``key=value`` and ``--key=value``; a bare ``None`` is null, as W&B sweeps mean it.

    A sweep's other styles too: ``+key=value``, ``++key=value``, and a JSON file of dotted keys. A
    part of an experiment's YAML is taken in by its file's name.

    Raises:
        ConfigError: no ``=``, no key, a value that is no YAML, or a file that is none.
    """
    found: list[Override] = []
    for text in texts:
        if isinstance(text, Override):
            found.append(text)
        elif text.endswith(".json") and "=" not in text:
            advice = "name a JSON file of keys and values"
            part = read_json(Path(text), dict[str, Any], "overrides", advice)
            found += _of_file(part, f"{label} {text!r}")
        elif is_yaml(text):
            part, _ = read_yaml(Path(text))
            found += _of_file(part, f"{label} {text!r}")
        else:
            found.append(_parse(text, label))
    return found


def is_yaml(text: str) -> bool:
    """Return whether an override is the name of a YAML file."""
    return text.endswith((".yaml", ".yml")) and "=" not in text


def apply_overrides(
    tree: dict[str, Any], overrides: Sequence[Override], nodes: Mapping[str, str]
) -> None:
    """Write overrides into a plain tree, in order, components' names before their options.

    ``nodes`` maps the keys (in the experiment or in a row of ``evaluation.methods``) that hold
    components to the component that the experiment has without them. A changed name drops the
    options that the node had: they were the old one's. So does a target's changed name with its
    recipe and its revision.
    """
    _replace_target(tree, overrides)
    for override in sorted(overrides, key=lambda o: not _names_a_component(o.key, nodes)):
        path = override.key.split(".")
        parent = _descend(tree, path[:-1], override.key)
        before, value = parent.get(path[-1]), override.value
        if _names_a_component(override.key, nodes):
            _rename(parent, value, _default_name(path[:-1], nodes))
        elif isinstance(before, dict) and isinstance(value, dict) and value:
            if "name" in value and _is_component(override.key, nodes):
                _rename(before, value["name"], _default_name(path, nodes))
            _merge(before, value)
        else:
            parent[path[-1]] = value


def _replace_target(tree: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Drop what made the target of the tree, where the overrides name another target."""
    target = tree.get("target")
    given: dict[str, Any] = {}
    for override in overrides:
        whole = override.value if override.key == "target" else None
        parts = whole if isinstance(whole, dict) else {}
        given |= {f"target.{name}": value for name, value in parts.items()}
        given[override.key] = override.value
    named = given.get("target.name")
    if not isinstance(target, dict) or named in (None, target.get("name", TargetConfig.name)):
        return
    for made_by in ("pretraining", "revision"):
        if not any(f"{key}.".startswith(f"target.{made_by}.") for key in given):
            target.pop(made_by, None)


def _of_file(part: Mapping[Any, Any], written: str) -> list[Override]:
    for key in part:
        if not isinstance(key, str) or not all(key.split(".")):
            raise ConfigError("", f"the key {key!r} is no full key of an experiment", written)
    return [Override(key, value, written) for key, value in part.items()]


def _parse(text: str, label: str) -> Override:
    written = f"{label} {text!r}"
    bare = text.removeprefix("--") if text.startswith("--") else text.lstrip("+")
    key, equals, value = bare.partition("=")
    if not equals:
        raise ConfigError("", f"has no '='; write {key or 'key'}=value", written)
    if not key or not all(key.split(".")):
        raise ConfigError("", "has no full key before the '='", written)
    try:
        return Override(key, _value(value), written)
    except (RecursionError, MemoryError):
        raise ConfigError(key, "the value is nested too deeply", written) from None
    except ValueError as error:
        raise ConfigError(key, f"the value cannot be read: {error}", written) from None


def _value(text: str) -> Any:
    if text.strip() == "None":
        return None
    if text.lstrip().startswith(("[", "{", "(")):
        try:  # a sweep writes lists and dicts as Python does: [1, None, True]
            with warnings.catch_warnings(action="ignore"):  # of "\\$", which is a backslash and a $
                return _lists(ast.literal_eval(text.strip()))
        except (ValueError, SyntaxError):
            pass  # not Python: YAML, as in [a, b]
    return parse_value(text)


def _lists(value: Any) -> Any:
    """Return tuples as lists: YAML knows no others."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _is_component(key: str, nodes: Mapping[str, str]) -> bool:
    path = key.split(".")
    if path == ["target", "tune"]:
        return True
    in_row = len(path) == 4 and path[:2] == ["evaluation", "methods"]
    return path[-1] in nodes and (len(path) == 1 or in_row)


def _names_a_component(key: str, nodes: Mapping[str, str]) -> bool:
    node, _, last = key.rpartition(".")
    return last == "name" and _is_component(node, nodes)


def _descend(tree: dict[str, Any], path: list[str], key: str) -> dict[str, Any]:
    for depth, name in enumerate(path):
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            where = ".".join(path[: depth + 1])
            raise ConfigError(key, f"{where} is {tree!r}, which has no keys")
    return tree


def _default_name(path: list[str], nodes: Mapping[str, str]) -> str | None:
    return nodes[path[0]] if len(path) == 1 else None


def _rename(node: dict[str, Any], name: Any, default: str | None) -> None:
    if node.get("name", default) != name:
        node.clear()
    node["name"] = name


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


@dataclass
class Origin:
    """Know where a configuration's keys come from.

    Attributes:
        name: what stands for the whole.
        overrides: in the order in which they were applied.
        places: full key -> ``file:line``.
    """

    name: str
    overrides: list[Override]
    places: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path, lines: Mapping[str, int]) -> None:
        """Add the keys of a file; one that an earlier file set too is the later one's."""
        self.places |= {key: f"{path}:{line}" for key, line in lines.items()}

    def blame(self, error: ConfigError) -> str:
        """Return the override that set the key, or what is around or in it, else file and line."""
        key = error.key
        for override in reversed(self.overrides):
            inside = override.key.startswith(f"{key}.")
            # An error of a whole component names the option that it is about in its text.
            spoken_of = override.key.rpartition(".")[2] in error.problem
            if override.covers(key) or (inside and (key not in self.places or spoken_of)):
                return override.label
        while key and key not in self.places:
            key = key.rpartition("[" if key.endswith("]") else ".")[0]
        return self.places[key] if key else self.name
