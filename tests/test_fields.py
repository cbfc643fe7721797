from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.errors import ConfigError, join
from falcon_lab.fields import (
    Form,
    Name,
    Range,
    choice,
    limited,
    literal,
    named,
    options,
    ranged,
    read_yaml,
    resolve,
    to_yaml,
)


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


@dataclass
class Limited:
    size: int = ranged(4, least=1)
    rate: float | None = ranged(None, above=0, below=1)
    betas: list[float] = ranged([0.5], least=0, most=1)
    mode: str = choice("fast", ("fast", "slow"))
    device: str = limited("cpu", Form(r"cpu|cuda", "write cpu or cuda"))


@dataclass
class Outer:
    inner: Limited = field(default_factory=Limited)
    rows: dict[str, Limited] = field(default_factory=dict)
    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low", f"is more than high={self.high}")
        if self.high > 9:
            raise ValueError("high is too high")


@pytest.mark.parametrize(
    ("values", "key", "problem"),
    [
        ({"size": 0}, "size", "is 0; it must be at least 1"),
        ({"rate": 0.0}, "rate", "is 0; it must be more than 0 and less than 1"),
        ({"rate": float("nan")}, "rate", "is nan; it must be more than 0 and less than 1"),
        ({"betas": [0.5, 2]}, "betas[1]", "is 2; it must be at least 0 and at most 1"),
        ({"mode": "fas"}, "mode", "is 'fas'; did you mean 'fast'? known: fast, slow"),
        ({"device": "gpu"}, "device", "is 'gpu'; write cpu or cuda"),
    ],
)
def test_a_value_beyond_its_fields_limit_is_named_wherever_its_dataclass_stands(
    values: dict[str, Any], key: str, problem: str
) -> None:
    for check, prefix in (
        (lambda: options(Limited, values, "tree"), "tree"),
        (lambda: resolve(Limited, values), ""),
        (lambda: resolve(Outer, {"inner": values}), "inner"),
        (lambda: resolve(Outer, {"rows": {"a": values}}), "rows.a"),
    ):
        with pytest.raises(ConfigError) as caught:
            check()
        assert (caught.value.key, caught.value.problem) == (join(prefix, key), problem)


def test_null_and_defaults_are_within_every_limit() -> None:
    assert resolve(Limited, {"rate": None}) == Limited()
    assert Limited().betas is not Limited().betas


def test_a_dataclass_may_name_the_field_that_does_not_fit_the_others() -> None:
    with pytest.raises(ConfigError, match=r"^tree\.low: is more than high=1$"):
        options(Outer, {"low": 2}, "tree")
    with pytest.raises(ConfigError, match=r"^tree: high is too high$"):
        options(Outer, {"high": 10}, "tree")


def test_a_limit_says_what_it_holds() -> None:
    assert str(Range(least=1)) == "at least 1"
    assert str(Range(above=0, most=1)) == "more than 0 and at most 1"
    assert str(Range()) == "a finite number"


@dataclass
class Rows:
    methods: dict[str, Inner] = named(Name("plain|HF generate"))
    rate: float = 1.0
    cap: float = float("inf")


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "HF generate", "a/b", "../../chats", "a\\b", ".hidden", "", " ", "a\nb", " a"),
        *("x" * 300, "é" * 101, "a\0b", "\ud83d"),
    ],
)
def test_names_that_files_are_called_by_are_no_paths(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Rows, {"methods": {name: {}}})
    assert caught.value.key.startswith("methods")


def test_names_may_have_spaces_and_signs() -> None:
    names = ["tree of 16", "chain,depth=6", "k=2", "plain tree", "τ", "v1.0"]
    assert list(resolve(Rows, {"methods": {name: {} for name in names}}).methods) == names


def test_numbers_are_finite_unless_the_default_is_not() -> None:
    assert resolve(Rows, {"cap": float("inf")}).cap == float("inf")
    for value in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="finite"):
            resolve(Rows, {"rate": value})


def test_a_key_that_is_no_text_and_half_a_character_are_refused() -> None:
    with pytest.raises(ConfigError, match="quote it"):
        resolve(Rows, {"methods": {1: {}}})
    with pytest.raises(ConfigError, match="surrogate"):
        options(Options, {"heads": 1, "anything": {"a": ["b\ud83d"]}}, "drafter")


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "\\${oc.env:HOME}", "a\\\\${b}", "${", "\\"])
def test_a_plain_text_is_written_down_and_read_as_it_stands(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(to_yaml({"heads": 1, "anything": {"text": text}}))
    tree, _ = read_yaml(path)
    assert resolve(Options, tree).anything == {"text": text}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 5000 + "]" * 5000, "too deeply"),
        ("a: &a [*a]", "without end"),
        (
            "\n".join(["a: &a0 [1]", *(f"b{i}: &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 9))]),
            "",
        ),
        ("a: \x00", "cannot be read"),
    ],
)
def test_a_yaml_without_end_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"x\.yaml: .*{said}"):
        read_yaml(path)


def test_a_yaml_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="byte 7 is no UTF-8"):
        read_yaml(path)
