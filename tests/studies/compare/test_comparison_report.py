"""Table, picture and report of a comparison with known figures."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from comparisons import measured, results
from falcon_lab.studies.compare.report import (
    COLUMNS,
    NODES_AXIS,
    ROUND_AXIS,
    ahead,
    format_comparison,
    headline,
    lead,
    render,
    speed_against,
    warnings,
    write_page,
)


def line_of(head: str, text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{head} "))


def test_the_table_has_every_head_at_every_budget_and_temperature_the_fastest_first() -> None:
    lines = format_comparison(results()).splitlines()[2:6]
    assert [line.split()[:3] for line in lines] == [
        ["fast", "chain-2", "0"],
        ["slow", "chain-2", "0"],
        ["fast", "chain-2", "1"],
        ["slow", "chain-2", "1"],
    ]


def test_a_row_has_speed_tau_both_ways_alpha_round_and_split() -> None:
    text = format_comparison(results())
    assert re.split(r"\s{2,}", text.splitlines()[0].strip()) == [
        *("head", "budget", "T"),
        *(column.header for column in COLUMNS),
    ]
    line = line_of("fast", text)
    assert "2.86× [2.00, 4.57]" in line
    for figure in ("1.86", "0.86", "46.2", "0.75", "643", "20/60", "yes"):
        assert figure in line.split()


def test_acceptance_by_position_and_memory_stand_in_a_table_of_their_own() -> None:
    _, _, table = format_comparison(results()).partition("accepted at 1, 2, … %")
    assert re.split(r"\s{2,}", line_of("fast", table))[-2:] == ["43 43 0 0", "1.0"]


def test_the_heads_are_listed_with_what_training_took_and_their_best_budget() -> None:
    shown = results()
    for training, rate in zip(shown["heads"]["fast"]["trainings"], (0.5, 0.7), strict=True):
        training["validation"] = {"val/accept_rate": rate}
    fast, slow = (x for x in format_comparison(shown).splitlines() if "1,234,567" in x)
    cells = re.split(r"\s{2,}", fast)
    assert cells[0] == "fast"
    assert {"2", "0 1", "4,096", "7", "60.0 [50.0, 70.0]", "chain-2 (T=0)"} <= set(cells)
    assert "—" in slow  # nothing is known of its validation


def test_who_is_ahead_is_shown_with_its_interval() -> None:
    for text in (format_comparison(results()), headline(results())):
        assert "2.86× [2.00, 4.57]" in text
    assert "T=0 chain-2: fast over slow" in format_comparison(results())
    assert headline(results()).startswith("fast ")
    doubtful = results()
    for pair in doubtful["pairs"]:
        pair["faster"] = False
    assert "not clear" in headline(doubtful)
    assert "not clear" in format_comparison(doubtful)


def test_a_lossy_head_is_labelled_wherever_it_is_named() -> None:
    found = measured()
    lossy = replace(found, lossless={c: c.head != "fast" for c in found.records})
    shown = results(lossy)
    assert line_of("fast", format_comparison(shown)).startswith("fast (lossy)")
    assert "fast (lossy)" in headline(shown)
    assert "fast (lossy)" in speed_against(NODES_AXIS, shown["rows"])
    [warning] = warnings(shown)
    assert "fast" in warning
    assert "lossy" in warning
    for text in (format_comparison(shown), unescape(render(shown))):
        assert warning in text


def test_what_must_be_known_first_is_warned_of() -> None:
    shown = results()
    assert warnings(shown) == []
    shown["rows"][0] |= {"identical_share": 0.75, "largest_margin": 0.25}
    shown["left_out"] = {"gone": "no drafter named 'gone' is installed"}
    differing, left_out = warnings(shown)
    for words in ("fast", "chain-2", "25 %", "0.2500"):
        assert words in differing
    shown["rows"][0]["ties"] = len(shown["rows"][0]["seeds"]) * shown["rows"][0]["prompts"] // 4
    assert "at ties" in warnings(shown)[0]
    assert "gone" in left_out
    assert shown["left_out"]["gone"] in left_out


def test_the_picture_has_a_panel_a_temperature_and_a_line_a_head() -> None:
    for what in (NODES_AXIS, ROUND_AXIS):
        svg = speed_against(what, results()["rows"])
        for words in ("greedy", "temperature 1", "fast", "slow", what[1]):
            assert words in svg
        assert speed_against(what, []) == ""


def test_several_prompt_sets_have_a_column_a_panel_and_a_verdict_each() -> None:
    shown = results(measured(0.0, "code"), measured(0.0, "chat"))
    table = format_comparison(shown).splitlines()
    assert [line.split()[:3] for line in table[2:6]] == [
        ["fast", "code", "chain-2"],
        ["slow", "code", "chain-2"],
        ["fast", "chat", "chain-2"],
        ["slow", "chat", "chain-2"],
    ]
    assert [line.partition(":")[0] for line in ahead(shown)] == [
        "T=0 code chain-2",
        "T=0 chat chain-2",
    ]
    picture = speed_against(ROUND_AXIS, shown["rows"])
    assert "code, greedy" in picture
    assert "chat, greedy" in picture
    assert "(chain-2, code)" in headline(shown)
    assert "2 prompts of code and 2 prompts of chat" in lead(shown)
    assert "2 prompts of code, 2 prompts of chat in turns" in render(shown)


def test_the_report_is_one_file_with_every_part(tmp_path: Path) -> None:
    path = write_page(tmp_path / "tiny.html", results())
    html = path.read_text("utf-8")
    for part in ("Speed-up against nodes", "Comparison", "Who is ahead", "The heads", "Provenance"):
        assert f"<h2>{part}</h2>" in html
    assert "<svg" in html
    assert "http://" not in re.sub(r"http://www\.w3\.org[^\"]*", "", html)


def test_no_name_of_a_comparison_can_inject_a_script() -> None:
    bad = "<script>alert(1)</script>"
    shown = results()
    for row in shown["rows"]:
        row |= {"head": bad, "budget": bad}
    shown |= {"heads": {bad: shown["heads"]["fast"]}, "left_out": {bad: bad}}
    shown |= {"name": bad, "command": bad, "target": {"name": bad}}
    page = render(shown)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 10
