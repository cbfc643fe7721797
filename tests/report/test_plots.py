"""The one way to draw."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib
import pytest

from falcon_lab.report.plots import COLOURS, Bar, Curve, Panel, bar_plot, colours_of, line_plot

BLUE, GREEN = COLOURS[:2]
CURVE = Curve([1, 2, 4], [1.0, None, 3.0], BLUE, "falcon", [0.5, None, 2.0], [1.5, None, 4.0])
PANEL = Panel([CURVE], "Speed", "nodes", "tok/s", level=1)


def texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_a_panel_names_its_axes_its_curves_and_itself() -> None:
    assert {"Speed", "nodes", "tok/s", "falcon"} <= set(texts(line_plot([PANEL], "a")))


def test_the_same_plot_is_the_same_text_and_another_one_has_other_ids() -> None:
    def ids(svg: str) -> set[str]:
        return set(re.findall(r' id="([a-z]+[0-9a-f]{6,})"', svg))

    first = line_plot([PANEL], "a")
    assert first == line_plot([PANEL], "a")
    assert ids(first)
    assert not ids(first) & ids(line_plot([PANEL], "b"))


@pytest.mark.parametrize("interval", ["band", "whiskers"])
def test_intervals_are_drawn_where_they_are_known(interval: str) -> None:
    bare = Curve(CURVE.x, CURVE.y, BLUE)
    known = Curve(CURVE.x, CURVE.y, BLUE, "", CURVE.low, CURVE.high, interval)  # type: ignore[arg-type]
    none = Curve(CURVE.x, CURVE.y, BLUE, "", [None] * 3, [None] * 3)
    plain, drawn, empty = (line_plot([Panel([c])], "a") for c in (bare, known, none))
    assert "Collection_1" in drawn  # what matplotlib calls bands and groups of lines
    assert "Collection" not in plain
    assert empty == plain


def test_panels_without_curves_are_left_out_and_nothing_gives_nothing() -> None:
    shown = texts(line_plot([PANEL, Panel([], "Empty"), Panel([CURVE], "Third")], "a"))
    assert {"Speed", "Third"} <= set(shown)
    assert "Empty" not in shown
    assert line_plot([Panel([], "Empty")], "a") == ""
    assert bar_plot([], "a", x="") == ""


def test_one_axis_for_all_panels_holds_the_curves_of_every_panel() -> None:
    high = Panel([Curve([1, 2], [50.0, 80.0], GREEN, "high")], "High", bottom=0)
    low = Panel([Curve([1, 2], [1.0, 2.0], BLUE, "low")], "Low", bottom=0)
    assert "80" in texts(line_plot([low, high], "a", share_y=True))


def test_a_legend_beside_names_what_several_panels_share_once() -> None:
    shown = texts(line_plot([PANEL, PANEL], "a", legend_beside=True))
    assert shown.count("falcon") == 1


def test_logarithmic_axes_name_the_places_that_were_measured() -> None:
    panel = Panel([Curve([512, 4096], [1.0, 9.0], BLUE)], ticks=[512, 4096], log="xy", headroom=2)
    assert {"512", "4k"} <= set(texts(line_plot([panel], "a")))


def test_bars_have_their_names_texts_parts_and_legend() -> None:
    bars = [
        Bar("tree", [(1.0, BLUE, "1.0"), (2.0, GREEN, "2.0")], "3.0 ms"),
        Bar("chain", [(2.0, BLUE, "")], "2.0 ms", 1.5, 2.5, mark=2.2),
    ]
    shown = texts(bar_plot(bars, "a", x="ms", level=1, legend={"draft": BLUE}, mark="predicted"))
    assert {"tree", "chain", "3.0 ms", "2.0 ms", "1.0", "2.0", "draft", "predicted"} <= set(shown)


def test_a_name_that_is_markup_stays_text() -> None:
    bad = "<script>alert(1)</script>"
    panel = Panel([Curve([1], [1.0], BLUE, bad)], bad, bad, bad)
    for svg in (line_plot([panel], "a"), bar_plot([Bar(bad, [(1.0, BLUE, bad)], bad)], "a", x=bad)):
        assert "<script" not in svg
        assert bad in texts(svg)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_name_that_is_no_formula_is_drawn_as_it_stands() -> None:
    name = "$\\nosuch{$ a_b^ 🦅\nand more"
    drawn = bar_plot([Bar(name, [(1, "red", "")])], "s", x=name)
    drawn += line_plot([Panel([Curve([1, 10], [1, 1000], "red", name)], name, log="xy")], "s")
    assert drawn.count("$\\nosuch{$") >= 2
    assert "mathdefault" not in drawn


def test_names_keep_their_colours_and_many_names_share_some() -> None:
    names = [str(number) for number in range(len(COLOURS) + 1)]
    found = colours_of(names)
    assert list(found) == names
    assert found["0"] == found[names[-1]] != found["1"]


def test_plotting_leaves_matplotlibs_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    line_plot([PANEL], "a")
    assert dict(matplotlib.rcParams) == before
