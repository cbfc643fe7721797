"""What tables and pages show of measured methods."""

from __future__ import annotations

from typing import Any

from falcon_lab.measure.measurement import Measurement
from falcon_lab.measure.results import build_results
from falcon_lab.report.methods import format_table, headline, warnings
from measuring import HEADER, TARGET, measurement


def results(target: Any = TARGET, **changes: Any) -> dict[str, Any]:
    left_out = {"lookup": "not installed"}
    return build_results(
        measurement(**changes), experiment={}, target=target, header=HEADER, left_out=left_out
    )


def test_the_table_shows_what_was_measured() -> None:
    found = results()
    lines = format_table(found).splitlines()
    for header in ("method", "tok/s", "speed-up [95 %]", "τ", "τ draft", "α %", "identical"):
        assert header in lines[0]
    [tree, work] = [line for line in lines if line.startswith("tree")]
    s = found["methods"]["tree"]
    speedup = s["speedup"]
    interval = f"{speedup['ratio']:.2f}× [{speedup['low']:.2f}, {speedup['high']:.2f}]"
    assert tree.split() == [
        "tree",
        f"{s['tokens_per_second']:.1f}",
        *interval.split(),
        f"{s['tau']:.2f}",
        f"{s['tau_draft']:.2f}",
        f"{100 * s['alpha']:.1f}",
        "yes",
    ]
    shares = [f"{100 * share:.0f}" for share in s["acceptance"]]
    assert work.split() == ["tree", "20", "60", "10", "10", "16.0", "4.0", *shares]
    [left_out] = [line for line in lines if "lookup" in line]
    assert "not installed" in left_out


def test_methods_come_in_order_and_the_columns_stand_under_each_other() -> None:
    block = format_table(results()).split("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in block[2:]] == ["plain", "HF generate", "chain", "tree"]
    right = block[0].index("tok/s") + len("tok/s")
    assert all(line[:right].rstrip()[-1].isdigit() and line[right] == " " for line in block[2:])
    assert max(map(len, block)) <= 100


def test_the_figures_of_a_method_that_drafts_nothing_are_dashes() -> None:
    plain = next(line for line in format_table(results()).splitlines() if line.startswith("plain"))
    assert plain.split()[2:] == ["—"] * 5


def test_a_lossy_rule_a_difference_and_a_failed_gate_are_said_aloud() -> None:
    bad = dict(TARGET, quality={"passed": False, "verdict": "0.40 of its completions parse"})
    found = results(bad, lossy=True, diverging=True)
    text = format_table(found)
    assert "tree (lossy)" in text
    assert "no: 7 of 8" in text
    gate, lossy, differing = warnings(found)
    assert "0.40 of its completions parse" in gate
    assert "tree" in lossy
    assert "lossy" in lossy
    for words in ("tree", "1 of 8", "0.003"):
        assert words in differing
    assert sum(line.startswith("! ") for line in text.splitlines()) == 3


def test_ties_that_rounding_decides_are_told_from_differences() -> None:
    found = results(diverging=True)
    found["methods"]["tree"]["ties"] = 1
    assert "7 of 8, else ties" in format_table(found)
    [tied] = warnings(found)
    for words in ("tree", "1 of 8", "at ties alone", "0.003"):
        assert words in tied
    assert headline(found).endswith("but for ties that rounding decides.")


def test_results_of_earlier_versions_know_no_ties() -> None:
    found = results(diverging=True)
    del found["methods"]["tree"]["ties"]
    assert "no: 7 of 8" in format_table(found)


def test_a_clean_measurement_warns_of_nothing() -> None:
    assert warnings(results()) == []
    assert warnings(results(dict(TARGET, quality=None))) == []


def about(found: Measurement, **changes: Any) -> str:
    experiment = {"name": "csgd"}
    return headline(
        build_results(found, experiment=experiment, target=TARGET, header=HEADER, **changes)
    )


def test_the_first_sentence_is_the_measured_figure_with_its_interval() -> None:
    found = results()
    s = found["methods"]["tree"]["speedup"]
    sentence = headline(found)
    for words in ("tree", "tiny-code", f"{s['ratio']:.2f}×", f"{s['low']:.2f}–{s['high']:.2f}"):
        assert words in sentence
    assert sentence.endswith("with the same output.")


def test_the_first_sentence_claims_no_more_than_was_measured() -> None:
    for doubtful in (
        about(measurement(lossy=True), headline="tree"),
        about(measurement(diverging=True)),
        about(measurement(1)),
    ):
        assert not doubtful.endswith("with the same output.")
    assert "lossy" in about(measurement(lossy=True), headline="tree")
    assert "interval" not in about(measurement(1)).replace("no interval", "")
    plain = Measurement({"plain": measurement(2).records["plain"]}, {"plain": True})
    assert "×" not in about(plain)
