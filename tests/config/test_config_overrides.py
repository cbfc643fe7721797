from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.overrides import apply_overrides, parse_overrides
from falcon_lab.errors import ConfigError, FalconLabError


def value_of(text: str) -> Any:
    return parse_overrides([f"key={text}"])[0].value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("4.0", 4.0),
        ("1e-4", 1e-4),
        ("true", True),
        ("False", False),  # as a sweep writes it
        ("null", None),
        ("None", None),
        ("abc", "abc"),
        ("a=b", "a=b"),
        ("'4'", "4"),
        ("[4, 2, 1]", [4, 2, 1]),
        ("[a, b]", ["a", "b"]),
        ("['a', None, True, 1.5]", ["a", None, True, 1.5]),
        ("(1, 2)", [1, 2]),
        ("{'a': None, 'b': {'c': (1,)}}", {"a": None, "b": {"c": [1]}}),
        ("{a: 1}", {"a": 1}),
        ("${drafter.block}", "${drafter.block}"),
        ("", None),
    ],
)
def test_values_are_read_in_the_styles_of_shells_and_sweeps(text: str, value: Any) -> None:
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_dashes_and_pluses_in_front_change_nothing() -> None:
    bare, dashed, *plus = parse_overrides(["a.b=1", "--a.b=1", "+a.b=1", "++a.b=1"])
    assert (bare.key, bare.value) == (dashed.key, dashed.value) == ("a.b", 1)
    assert [(each.key, each.value) for each in plus] == [("a.b", 1)] * 2
    assert dashed.label == "override '--a.b=1'"


def test_a_json_file_holds_overrides_with_their_types(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a.b": null, "c": "None", "d": [1, true]}')
    found = {override.key: override.value for override in parse_overrides([str(file)])}
    assert found == {"a.b": None, "c": "None", "d": [1, True]}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["target.name=other"], {"name": "other"}),
        (["target={name: other}"], {"name": "other"}),
        (["target.name=mine"], {"name": "mine", "revision": "v2", "pretraining": {"steps": 7}}),
        (
            ["target.pretraining.steps=9", "target.name=other"],
            {"name": "other", "pretraining": {"steps": 9}},
        ),
        (["target.name=other", "target.revision=v3"], {"name": "other", "revision": "v3"}),
        (["target.dtype=float64"], {"name": "mine", "dtype": "float64"}),
    ],
)
def test_a_target_of_another_name_drops_what_made_the_first(
    given: list[str], left: dict[str, Any]
) -> None:
    tree: dict[str, Any] = {
        "target": {"name": "mine", "revision": "v2", "pretraining": {"steps": 7}}
    }
    apply_overrides(tree, parse_overrides(given), {})
    assert left.items() <= tree["target"].items()
    if "dtype" not in left:
        assert tree["target"] == left


def test_a_part_of_a_yaml_is_taken_in_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text('tree: {name: static, template: ["0", "00"]}\nseed: 3\n')
    found = parse_overrides([str(file), "seed=4"])
    tree = {"tree": {"name": "static", "template": ["9"], "max_depth": 1}, "seed": 1}
    apply_overrides(tree, found, {"tree": "chain"})
    # The same component keeps the options that the part says nothing of; later words win.
    assert tree == {"tree": {"name": "static", "template": ["0", "00"], "max_depth": 1}, "seed": 4}
    other = {"tree": {"name": "chain", "depth": 9}}
    apply_overrides(other, found, {"tree": "chain"})
    assert other["tree"] == {"name": "static", "template": ["0", "00"]}
    assert found[0].label == f"override '{file}'"
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file"):
        parse_overrides([str(tmp_path / "gone.yaml")])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1]", "no overrides .*must be an object"),
        ("{", "no overrides .*not whole JSON"),
        ('{"seed": 1e999}', "beyond all bounds"),
        ('{"a..b": 1}', r"'a\.\.b' is no full key"),
        (None, "No such"),
    ],
)
def test_a_json_file_without_overrides_is_refused(
    content: str | None, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(FalconLabError, match=expected):
        parse_overrides([str(file)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--tree.depth", "override '--tree.depth': has no '='; write tree.depth=value"),
        ("=3", "override '=3': has no full key before the '='"),
        ("a..b=3", "override 'a..b=3': has no full key before the '='"),
        ("a=[1", "override 'a=[1': a: the value cannot be read"),
        ("a=${", "override 'a=${': a: the value cannot be read"),
    ],
)
def test_what_is_no_override_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([text])
    assert str(caught.value).startswith(expected)


def test_a_mapping_is_merged_into_the_one_that_is_there() -> None:
    tree = {"data": {"length": 3, "seed": 1, "deep": {"a": 1, "b": 2}}}
    apply_overrides(tree, parse_overrides(["data={'seed': 2, 'deep': {'b': 3}}"]), {})
    assert tree == {"data": {"length": 3, "seed": 2, "deep": {"a": 1, "b": 3}}}


def test_an_empty_mapping_replaces_the_one_that_is_there() -> None:
    tree: dict[str, Any] = {"methods": {"a": []}}
    apply_overrides(tree, parse_overrides(["methods={}"]), {})
    assert tree == {"methods": {}}


def test_the_last_of_two_overrides_wins() -> None:
    tree: dict[str, Any] = {}
    apply_overrides(tree, parse_overrides(["a.b=1", "a.b=2"]), {})
    assert tree == {"a": {"b": 2}}


def test_an_override_covers_what_lies_below_it() -> None:
    [override] = parse_overrides(["a.b=1"])
    assert override.covers("a.b")
    assert override.covers("a.b.c")
    assert override.covers("a.b[0]")
    assert not override.covers("a.bc")
    assert not override.covers("a")
