"""The model card of a saved drafter."""

from __future__ import annotations

import re
from typing import Any

import yaml

from falcon_lab.measure.results import build_results
from falcon_lab.report.card import drafter_card
from measuring import EXPERIMENT, HEADER, TARGET, measurement

CONFIG = {
    "drafter": {"name": "falcon", "block": 2},
    "provenance": {"name": "falcon", "distribution": "falcon-lab", "version": "0.1.0"},
    "target": {"name": "acme/tiny", "fingerprint": "5f2c9a1b"},
}


def results(**changes: Any) -> dict[str, Any]:
    return build_results(
        measurement(**changes), experiment=EXPERIMENT, target=TARGET, header=HEADER
    )


def test_the_card_holds_the_measured_figures_and_how_they_were_measured() -> None:
    found = results()
    card = drafter_card(found, CONFIG)
    s = found["methods"]["tree"]
    [line] = [line for line in card.splitlines() if line.startswith("| tree |")]
    assert f" {s['tokens_per_second']:.1f} |" in line
    assert f" {s['speedup']['ratio']:.2f}× [{s['speedup']['low']:.2f}, " in line
    assert "Example CPU @ 2.50GHz, 1 of 2 cores" in card
    assert found["command"] in card
    assert "5f2c9a1b" in card
    assert '"max_steps": 500' in card
    assert "`falcon` of `falcon-lab` 0.1.0" in card


def test_the_head_is_yaml_that_names_a_base_model_of_the_hub() -> None:
    [head] = re.findall(r"\A---\n(.*?)\n---\n", drafter_card(None, CONFIG), re.S)
    assert yaml.safe_load(head)["base_model"] == "acme/tiny"
    local = drafter_card(None, {**CONFIG, "target": {"name": "tiny-code", "fingerprint": "x"}})
    assert "base_model" not in local


def test_warnings_stand_above_the_figures() -> None:
    card = drafter_card(results(lossy=True), CONFIG)
    assert card.index("> **Note.** tree") < card.index("| tree (lossy) |")


def test_before_a_measurement_the_card_claims_nothing() -> None:
    card = drafter_card(None, CONFIG)
    assert "| method |" not in card
    assert "×" not in card


def test_the_loading_example_is_python_that_imports_what_exists() -> None:
    [example] = re.findall(r"```python\n(.*?)```", drafter_card(None, CONFIG), re.S)
    compile(example, "card", "exec")
    exec("\n".join(line for line in example.splitlines() if line.startswith("from ")), {})
