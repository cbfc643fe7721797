"""The plots of a run."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest

from falcon_lab.measure.results import build_results
from falcon_lab.report import method_plots as plots
from falcon_lab.report.plots import BASELINE
from measuring import EXPERIMENT, HEADER, HISTORY, TARGET, measurement

PLOTS = (plots.speedups, plots.time_split, plots.acceptance, plots.accepted_histograms)


@pytest.fixture(scope="module")
def methods() -> dict[str, Any]:
    found = build_results(
        measurement(4, lossy=True), experiment=EXPERIMENT, target=TARGET, header=HEADER
    )
    return dict(found["methods"])


def texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize("plot", PLOTS)
def test_a_plot_is_well_formed_and_names_every_method(plot: Any, methods: dict[str, Any]) -> None:
    shown = texts(plot(methods))
    assert "chain" in shown
    assert "tree (lossy)" in shown


@pytest.mark.parametrize("plot", PLOTS)
def test_nothing_to_draw_gives_nothing(plot: Any) -> None:
    assert plot({}) == ""
    assert plots.training_curves([]) == ""


def test_a_speed_up_stands_beside_its_bar(methods: dict[str, Any]) -> None:
    shown = texts(plots.speedups(methods))
    for name in ("HF generate", "chain", "tree"):
        assert f"{methods[name]['speedup']['ratio']:.2f}×" in shown


def test_one_prompt_draws_a_bar_without_whiskers() -> None:
    found = build_results(measurement(1), experiment=EXPERIMENT, target=TARGET, header=HEADER)
    assert "tree" in texts(plots.speedups(found["methods"]))


def test_training_curves_show_what_was_logged() -> None:
    shown = texts(plots.training_curves(HISTORY))
    assert {"Loss", "Accuracy by place in the block", "Glance ratio λ"} <= set(shown)
    assert {"train/loss", "val/loss", "train/position 2", "val/accept rate"} <= set(shown)
    assert "Expected τ, bonus token counted" not in shown
    more = [{**HISTORY[-1], "val/expected_accept_length": 3.2}]
    assert "Expected τ, bonus token counted" in texts(plots.training_curves(more))


def test_ids_of_several_plots_on_one_page_do_not_clash(methods: dict[str, Any]) -> None:
    ids = [set(re.findall(r' id="(p[0-9a-f]{6,})"', plot(methods))) for plot in PLOTS]
    assert all(ids)
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_plotting_leaves_matplotlibs_settings_alone(methods: dict[str, Any]) -> None:
    before = dict(matplotlib.rcParams)
    plots.speedups(methods)
    assert dict(matplotlib.rcParams) == before


def test_methods_keep_their_colour_and_those_that_draft_nothing_are_grey(
    methods: dict[str, Any],
) -> None:
    found = plots.colours(methods)
    assert found["plain"] == found["HF generate"] == BASELINE
    assert len({found["chain"], found["tree"], BASELINE}) == 3


def test_a_panel_without_curves_is_not_drawn() -> None:
    record = {"step": 1, "train/loss": 1.0, "train/glance_ratio": 0.4, "val/accept_rate": 0.5}
    shown = texts(plots.training_curves([record]))
    assert {"Loss", "Glance ratio λ", "Expected acceptance, 1 − TV"} <= set(shown)
    assert "Accuracy by place in the block" not in shown
    assert shown.count("step") == 3
