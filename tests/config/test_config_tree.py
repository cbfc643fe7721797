from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.errors import ConfigError
from falcon_lab.fields import literal, options, read_yaml, to_yaml


@dataclass
class Inner:
    size: int = 1


@dataclass
class Options:
    heads: int
    rates: list[float] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)
    maybe: int | None = None
    anything: Any = None


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        options(Options, values, "drafter")
    return str(caught.value)


def test_options_become_the_dataclass_with_nested_ones() -> None:
    values = {"heads": 2.0, "rates": [1, 0.5], "inner": {"size": 3}, "maybe": 4.0}
    made = options(Options, values, "drafter")
    assert made == Options(2, [1.0, 0.5], Inner(3), 4)
    assert type(made.inner) is Inner


def test_wrong_options_are_named_with_the_key_of_their_node() -> None:
    assert refusal({}) == "drafter.heads: is missing"
    assert refusal({"heads": 1, "headz": 2}).startswith("drafter.headz: unknown key; did you mean")
    assert refusal({"heads": 1, "inner": {"sise": 2}}).startswith("drafter.inner.sise: unknown key")
    assert refusal({"heads": 1, "rates": ["x"]}).startswith("drafter.rates[0]: Value 'x'")
    assert refusal({"heads": 1, "inner": {"size": "x"}}).startswith("drafter.inner.size: Value 'x'")


def test_text_of_options_is_never_interpolated_twice() -> None:
    made = options(Options, {"heads": 1, "anything": {"a": ["${b}"]}}, "drafter")
    assert made.anything == {"a": ["${b}"]}


def test_a_dataclass_that_omegaconf_cannot_read_is_an_error_of_the_node() -> None:
    @dataclass
    class Unreadable:
        value: set[int] = field(default_factory=set)

    with pytest.raises(ConfigError, match=r"drafter: the options .*Unreadable cannot be used"):
        options(Unreadable, {}, "drafter")


def test_lines_are_known_for_nested_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\nb:\n  c: {d: 2}\n\ne: [1]\n")
    tree, lines = read_yaml(path)
    assert tree == {"a": 1, "b": {"c": {"d": 2}}, "e": [1]}
    assert lines == {"a": 1, "b": 2, "b.c": 3, "b.c.d": 3, "e": 5}


def test_yaml_of_a_tree_reads_back_as_it_was(tmp_path: Path) -> None:
    tree = {"a": "1e-4", "b": ["${x}", "null", None, True, 1.5, "é"], "c": {"0": {}, "d": []}}
    path = tmp_path / "x.yaml"
    path.write_text(to_yaml(tree), encoding="utf-8")
    assert read_yaml(path)[0] == literal(tree)
