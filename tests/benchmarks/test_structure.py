"""``benchmarks/structure.py`` on a package of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import structure
from structure import Checkout, best_order, circles_of, directions, is_fragment, longest

FILES = {
    "__init__.py": "",
    "low.py": '"""The low one."""\n',
    "middle/__init__.py": "",
    "middle/one.py": "from falcon_lab.middle import two\nimport falcon_lab.low\n",
    "middle/two.py": "def f():\n    from falcon_lab.middle.one import g\n",
    "high.py": "from falcon_lab.middle.one import f\n" + "x = 1\n" * 50,
}
LIST = "## Which way imports point\n\n    high  what it is\n    middle\n    low\n\n## Next\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name, text in FILES.items():
        path = tmp_path / "src" / "falcon_lab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Checkout(tmp_path)


def own_list(checkout: Checkout) -> None:
    (checkout.folder / "docs").mkdir()
    (checkout.folder / "docs" / "architecture.md").write_text(LIST, encoding="utf-8")


def test_lines_and_files_are_counted(checkout: Checkout) -> None:
    found = structure.sizes(checkout)
    assert list(found.values()) == ["56", "6", "5", "3"]


def test_imports_anywhere_count_but_a_chain_is_of_what_is_loaded(checkout: Checkout) -> None:
    one, two = "falcon_lab.middle.one", "falcon_lab.middle.two"
    assert checkout.imports["falcon_lab.high"] == {one}
    assert circles_of(checkout.imports) == [{one, two}]
    assert circles_of(checkout.loads) == []
    assert longest(checkout.loads, checkout.files) == 3  # high, one, and two or low
    assert longest(checkout.imports, checkout.files) == 3  # the circle counts as one


def test_an_arrow_runs_up_by_the_checkouts_own_list(checkout: Checkout) -> None:
    own_list(checkout)
    assert directions(checkout) == {
        "pairs of packages that import each other": "0",
        "circles of files": "1 (of 2 files)",
        "arrows that run up": "0 (its own order)",
    }
    low = checkout.folder / "src" / "falcon_lab" / "low.py"
    low.write_text("import falcon_lab.high\nimport falcon_lab.middle.two\n", encoding="utf-8")
    found = directions(Checkout(checkout.folder))
    assert found["pairs of packages that import each other"] == "1"
    assert found["arrows that run up"] == "2 (its own order)"


def test_without_a_list_the_order_with_the_fewest_is_looked_for() -> None:
    assert best_order({("a", "b"), ("b", "c"), ("a", "c"), ("c", "a")}) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("docstring", "fragment"),
    [
        ("The tree.", True),
        ("Of the weights.", True),
        ("Return the tree.", False),
        ("The tree is grown.", False),
        ("What a pass costs.", False),
        ("A tree.\n\nIt is grown.", True),
    ],
)
def test_a_sentence_has_a_verb(docstring: str, fragment: bool) -> None:
    assert is_fragment(docstring) is fragment


def test_words_are_counted_whole_or_as_parts_of_names() -> None:
    text = "told untold probes probe Look look looked drafts_at_once tell_told rows"
    words = ("told", "_told", "probe", "Look", "at_once", "rows")
    assert [structure.count(word, text) for word in words] == [2, 1, 2, 1, 1, 1]


def test_two_checkouts_stand_side_by_side(checkout: Checkout) -> None:
    lines = structure.main([str(checkout.folder)] * 2).splitlines()
    assert lines[0].split() == ["before", "after"]
    assert lines[1].split() == ["source", "lines", "56", "56"]
    assert not any("round" in line for line in lines)  # there is no engine to run


LOADED = {"an eager Falcon round: modules": 67, "a training step: modules": 77}
"""What they imported before a target could draft for itself; others must not make it more."""


@pytest.mark.slow
def test_a_round_and_a_step_of_this_checkout_import_no_more_modules_than_they_did() -> None:
    found = structure.loaded(Checkout(Path(__file__).parents[2]))
    assert len(found) == 6
    figures = {what: int(figure.replace(",", "")) for what, figure in found.items()}
    assert all(figure > 5 for figure in figures.values())
    assert {what: figures[what] for what in LOADED if figures[what] > LOADED[what]} == {}
