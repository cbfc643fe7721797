from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import reduce
from math import inf, isinf, nan
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from everything import everything
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import ConfigError
from falcon_lab.fields import LIMIT, Choice, Range, options, ranged, resolve
from falcon_lab.studies.compare.plan import ComparisonConfig

Found = tuple[str, Any, Field[Any]]

CLASSES: dict[str, Any] = {"experiment": Experiment, "comparison": ComparisonConfig} | {
    f"{c.kind} {c.full_name}": c.config for c in everything().components if c.config
}
"""Every dataclass whose fields a YAML or an option can set."""

FIGURES = "paper.published"
"""Published figures are shown and never computed with; they are finite as all numbers are."""


def every_field(cls: Any, prefix: str = "") -> Iterator[Found]:
    """Full key, type and field of all that can be set, also below a section that may be null."""
    for each in fields(cls):
        hint = get_type_hints(cls)[each.name]
        inner = [part for part in (hint, *get_args(hint)) if is_dataclass(part)]
        for part in inner:
            below = "any." if get_origin(hint) is dict else ""
            yield from every_field(part, f"{prefix}{each.name}.{below}")
        if not inner:
            yield f"{prefix}{each.name}", hint, each


def parts(hint: Any) -> set[Any]:
    """A type and all that it is made of, as of ``list[int] | None``."""
    return {hint}.union(*map(parts, get_args(hint)))


def numbers(cls: Any) -> dict[str, Field[Any]]:
    """Key -> field of all numbers and lists of numbers."""
    return {
        key: each
        for key, hint, each in every_field(cls)
        if {int, float} & parts(hint) and key != FIGURES
    }


def without_range(cls: Any) -> list[str]:
    """Keys of numbers, and of lists of numbers, that could be any, or as large as one likes."""
    return [key for key, each in numbers(cls).items() if not bounded(each.metadata.get(LIMIT))]


def bounded(limit: Any) -> bool:
    return isinstance(limit, Range) and not isinf(least(limit)) and not isinf(most(limit))


def least(limit: Range) -> float:
    return max(limit.least, limit.above)


def most(limit: Range) -> float:
    return min(limit.most, limit.below)


LIMITS = {
    key: found.metadata[LIMIT]
    for key, _, found in every_field(Experiment)
    if LIMIT in found.metadata
}


def tree_with(key: str, value: Any) -> dict[str, Any]:
    """The tree with one key, and what its section cannot be without."""
    server = {"data": {"server": {"url": "http://localhost:8000/v1"}}}
    tree: dict[str, Any] = server if key.startswith("data.server.") else {}
    node = tree
    *path, last = key.split(".")
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    return tree


def load(key: str, value: Any) -> Experiment:
    return resolve(Experiment, tree_with(key, value))


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_has_a_range_with_two_ends(name: str) -> None:
    assert without_range(CLASSES[name]) == []


def test_a_number_without_a_range_is_found() -> None:
    @dataclass
    class Inner:
        size: int = 1
        some: list[float] | None = None

    @dataclass
    class Outer:
        inner: Inner | None = None
        good: float | None = ranged(None, least=0, most=1)
        endless: float = ranged(0.0, least=0)
        flag: bool = True

    Outer.__annotations__["inner"] = Inner | None  # a local class is not found by its name
    assert without_range(Outer) == ["inner.size", "inner.some", "endless"]


def outside(each: Field[Any]) -> list[float]:
    """Numbers that a field refuses: no numbers at all, too large ones, and those next to it."""
    limit = each.metadata[LIMIT]
    return [nan, inf, -inf, 1e300, 10**30, 10**400, -(10**30), least(limit) - 1, most(limit) + 1]


@pytest.mark.parametrize("name", CLASSES)
def test_a_number_outside_its_range_is_refused_in_one_line_by_its_key(name: str) -> None:
    hints = {key: hint for key, hint, _ in every_field(CLASSES[name])}
    for key, each in numbers(CLASSES[name]).items():
        listed = list in map(get_origin, parts(hints[key]))
        for number in outside(each):
            whole = int(number) if isinstance(number, float) and number % 1 == 0 else number
            with pytest.raises(ConfigError) as caught:
                options(CLASSES[name], tree_with(key, [whole] if listed else whole), "it")
            assert caught.value.key.partition("[")[0] == f"it.{key}", (key, number)
            assert len(str(caught.value)) < 200
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CLASSES)
def test_both_ends_of_a_range_belong_to_it_unless_it_is_open(name: str) -> None:
    for key, each in numbers(CLASSES[name]).items():
        limit = each.metadata[LIMIT]
        assert limit.refusal(limit.least) is None or limit.above >= limit.least, key
        assert limit.refusal(limit.most) is None or limit.below <= limit.most, key


@pytest.mark.parametrize(
    ("cls", "key", "items"),
    [
        (Experiment, "seeds", [1, 1]),
        (Experiment, "stages", ["data", "data"]),
        (ComparisonConfig, "temperatures", [0, 1, 0.0]),
        (ComparisonConfig, "budgets", ["own", "own"]),
        (ComparisonConfig, "only", ["a", "a"]),
        (ComparisonConfig, "tuning.grid", ["own", "own"]),
    ],
)
def test_what_is_done_once_each_is_not_named_twice(cls: Any, key: str, items: list[Any]) -> None:
    with pytest.raises(ConfigError, match="twice") as caught:
        resolve(cls, tree_with(key, items))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distillation.optimizer.lr", 0.0),
        ("decoding.kv_memory", 0.0),
        ("evaluation.top_p", 0.0),
        ("evaluation.top_p", 1.1),
        ("evaluation.top_p", 1e-300),
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
        ("evaluation.temperature", 1e-300),
        ("evaluation.temperature", 5e-324),
        ("evaluation.stop", [""]),
        ("evaluation.prompts.texts", ["a", " "]),
        ("evaluation.prompts.name", ""),
        ("out", ""),
        ("target.name", ""),
        ("data.corpus", " "),
        ("wandb.project", "a/b"),
        ("wandb.tags", ["a" * 65]),
        ("report.html", 2),
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


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"target": {"pretraining": {"length": 3000}}}, "target.pretraining.length"),
        ({"target": {"pretraining": {"model": {"max_positions": 9}}}}, "target.pretraining.length"),
        ({"target": {"pretraining": {}}, "data": {"length": 3000}}, "data.length"),
    ],
)
def test_a_length_beyond_the_positions_is_blamed_on_its_own_key(
    tree: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match="positions") as caught:
        resolve(Experiment, tree)
    assert caught.value.key == key


def test_a_long_target_may_be_measured_where_nothing_is_packed() -> None:
    tree = {"target": {"pretraining": {}}, "data": {"length": 3000}, "stages": ["evaluate"]}
    assert resolve(Experiment, tree).data.length == 3000
