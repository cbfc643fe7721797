from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import reduce
from typing import Any, get_args, get_type_hints

import pytest

from everything import everything
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import ConfigError
from falcon_lab.fields import LIMIT, Choice, Range, ranged, resolve

Found = tuple[str, Any, Field[Any]]


def every_field(cls: Any, prefix: str = "") -> Iterator[Found]:
    """Full key, type and field of all that can be set, also below a section that may be null."""
    for each in fields(cls):
        hint = get_type_hints(cls)[each.name]
        inner = [part for part in (hint, *get_args(hint)) if is_dataclass(part)]
        for part in inner:
            yield from every_field(part, f"{prefix}{each.name}.")
        if not inner:
            yield f"{prefix}{each.name}", hint, each


def parts(hint: Any) -> set[Any]:
    """A type and all that it is made of, as of ``list[int] | None``."""
    return {hint}.union(*map(parts, get_args(hint)))


def without_range(cls: Any) -> list[str]:
    """Keys of numbers, and of lists of numbers, that could be any."""
    return [
        key
        for key, hint, each in every_field(cls)
        if {int, float} & parts(hint) and not isinstance(each.metadata.get(LIMIT), Range)
    ]


LIMITS = {key: found.metadata[LIMIT] for key, _, found in every_field(Experiment) if found.metadata}
RANGES = {key: limit for key, limit in LIMITS.items() if isinstance(limit, Range)}


def load(key: str, value: Any) -> Experiment:
    tree: dict[str, Any] = {}
    node = tree
    *path, last = key.split(".")
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    return resolve(Experiment, tree)


def test_every_number_of_an_experiment_has_a_range() -> None:
    assert without_range(Experiment) == []


def test_a_number_without_a_range_is_found() -> None:
    @dataclass
    class Inner:
        size: int = 1
        some: list[float] | None = None

    @dataclass
    class Outer:
        inner: Inner | None = None
        good: float | None = ranged(None, least=0)
        flag: bool = True

    Outer.__annotations__["inner"] = Inner | None  # a local class is not found by its name
    assert without_range(Outer) == ["inner.size", "inner.some"]


def test_every_number_of_a_component_has_a_range() -> None:
    configs = {c.full_name: c.config for c in everything().components if c.config}
    assert {name: found for name, cls in configs.items() if (found := without_range(cls))} == {}


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_below_its_range_is_refused(key: str) -> None:
    below = int(max(RANGES[key].least, RANGES[key].above) - 1)
    with pytest.raises(ConfigError) as caught:
        load(key, [below, below] if key.endswith(("betas", "seeds")) else below)
    assert caught.value.key.partition("[")[0] == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distillation.optimizer.lr", 0.0),
        ("decoding.kv_memory", 0.0),
        ("evaluation.top_p", 0.0),
        ("evaluation.top_p", 1.1),
        ("distillation.optimizer.betas", [0.9]),
        ("distillation.optimizer.betas", [0.9, 1.0]),
        ("target.dtype", "float8"),
        ("target.attention", "flash"),
        ("target.device", "gpu"),
        ("target.pretraining.model.heads", 3),
        ("decoding.compile", "some"),
        ("wandb.mode", "of"),
        ("stages", ["data", "train"]),
        ("name", " "),
    ],
)
def test_what_cannot_work_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(key, value)
    assert caught.value.key.startswith(key)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_devices_are_written_as_torch_writes_them(device: str) -> None:
    assert load("target.device", device).target.device == device


def test_the_default_of_a_choice_is_one_of_its_words() -> None:
    experiment = load("target.pretraining", {})
    choices = {key: limit.words for key, limit in LIMITS.items() if isinstance(limit, Choice)}
    for key, words in choices.items():
        value = reduce(getattr, key.split("."), experiment)
        assert value is None or set([value] if isinstance(value, str) else value) <= set(words)
