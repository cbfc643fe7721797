"""``report.html``."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.measure.measurement import Measurement
from falcon_lab.measure.results import build_results
from falcon_lab.report.report import render, write_report
from measuring import EXPERIMENT, HEADER, HISTORY, TARGET, TREE, measurement


def results(found: Measurement | None = None, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "experiment": EXPERIMENT,
        "target": TARGET,
        "header": HEADER,
        "labels": {"tree": "falcon, k=2, static <auto>"},
        "left_out": {"lookup": "not installed"},
    }
    return build_results(found or measurement(), **{**arguments, **changes})


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects links and headings."""

    VOID = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path) -> None:
    path = write_report(tmp_path, results(), HISTORY, [TREE])
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    # Links inside the SVGs (clip paths, markers) stay on the page.
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert page.tags.count("svg") == 6  # curves, speed, time, acceptance, histogram, tree


def test_a_clean_run_has_no_warning_and_a_doubtful_one_says_why() -> None:
    clean = render(results(), HISTORY, [])
    assert 'class="warning"' not in clean
    assert 'class="fine"' in clean
    quality = {"passed": False, "verdict": "0.41 of its completions parse"}
    bad = render(
        results(measurement(lossy=True, diverging=True), target=dict(TARGET, quality=quality)),
        HISTORY,
        [TREE],
    )
    assert 'class="warning"' in bad
    assert "— method tree (lossy), prompt" in bad
    assert "0.41 of its completions parse" in bad
    assert bad.count("<li>") == 3
    assert "1 of 8 prompts" in bad
    assert '<span class="tag">lossy</span>' in bad
    assert re.search(r"tree \(lossy\) is .*faster than|faster than tree \(lossy\)", bad)


def test_everything_that_was_asked_for_is_there() -> None:
    found = results()
    page = render(found, HISTORY, [TREE])
    for heading in (
        "Comparison",
        "Where the speed comes from",
        "Training",
        "A round, drawn",
        "Outputs",
        "How it was measured",
        "What the figures mean",
        "Provenance",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert "lookup: not installed" in page
    assert "Example CPU @ 2.50GHz, 1 of 2 cores, float32" in page
    assert found["command"].split()[0] in page
    for name, s in found["methods"].items():
        assert f">{s['tokens_per_second']:.1f}<" in page, name


def test_rivals_are_called_slower_only_where_the_interval_says_so() -> None:
    page = render(results(), [], [])
    assert "tree is faster than chain" in page
    doubtful = results()
    for comparison in doubtful["comparisons"]:
        comparison["faster"] = False
    assert "tree is not clearly faster than chain" in render(doubtful, [], [])


def test_text_from_models_and_users_is_not_taken_for_markup() -> None:
    page = render(results(), [], [])
    assert "Holds fruit &lt;and&gt; &amp; such." in page
    assert "static &lt;auto&gt;" in page
    assert "<and>" not in page


def test_no_name_can_inject_a_script() -> None:
    bad = "<script>alert(1)</script>"
    found = results(
        experiment={**EXPERIMENT, "name": bad, "report": {"title": bad}},
        target={**TARGET, "name": bad, "quality": {"passed": False, "verdict": bad}},
        header={**HEADER, "hardware": {**HEADER["hardware"], "cpu": bad}, "command": bad},
        labels={"tree": bad},
        left_out={bad: bad},
    )
    found["methods"][bad] = {**found["methods"]["tree"], "method": bad}
    found["components"] = {bad: bad}
    tree = {**TREE, "texts": [bad] * len(TREE["texts"]), "prompt": bad, "method": bad}
    page = render(found, [{"step": 1, "train/loss": 1.0, f"val/position_1{bad}": 1.0}], [tree])
    assert "script" not in Page(page).tags
    assert page.count("&lt;script&gt;") >= 10


def test_answers_that_differ_are_shown_first() -> None:
    page = render(results(measurement(diverging=True)), [], [])
    assert page.index("heldout/3 (letters): different") < page.index(
        "heldout/0 (letters): identical"
    )


def test_a_run_without_training_or_trees_leaves_those_parts_out() -> None:
    page = render(results(), [], [])
    assert "<h2>Training</h2>" not in page
    assert "<h2>A round, drawn</h2>" not in page


@pytest.mark.parametrize("title", [None, "A <title>"])
def test_the_title_is_the_experiments_own_or_its_name(title: str | None) -> None:
    experiment = {**EXPERIMENT, "report": {"title": title}}
    page = render(results(experiment=experiment), [], [])
    shown = "A &lt;title&gt;" if title else "csgd"
    assert f"<title>{shown} · falcon-lab</title>" in page


def test_a_measurement_of_plain_decoding_alone_is_reported_too() -> None:
    plain = Measurement({"plain": measurement(2).records["plain"]}, {"plain": True})
    assert Page(render(results(plain), [], [])).open == []


def test_a_gpu_is_named_in_place_of_the_cpu() -> None:
    gpu = {**HEADER["hardware"], "gpu": "Example GPU 80GB", "device": "cuda"}
    found = results(header={**HEADER, "hardware": gpu})
    assert "Measured on Example GPU 80GB, float32" in render(found, [], [])
