"""Reading training curves back, without Lightning."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from falcon_lab.json_lines import read_lines


def read_history(path: Path) -> list[dict[str, Any]]:
    """One dict a step, steps ascending: ``step`` and the metrics logged there.

    Reads the JSON lines of ``HistoryLogger`` and the CSV of Lightning's ``CSVLogger``; a missing
    file is an empty history. A step that stands twice (trained again after a kill) keeps the later
    values. Lines that a kill cut off are left out.
    """
    if not path.exists():
        return []
    records = _csv(path) if path.suffix == ".csv" else read_lines(path)
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        step = record.get("step")
        if isinstance(step, int):
            steps.setdefault(step, {}).update(record)
    return [steps[step] for step in sorted(steps)]


def _csv(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = {key: _number(text) for key, text in row.items() if key and text}
            if isinstance(values.get("step"), float):
                values["step"] = int(values["step"])
            yield {key: value for key, value in values.items() if value is not None}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return None


def series(history: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    points = [(r["step"], r[metric]) for r in history if isinstance(r.get(metric), int | float)]
    return [step for step, _ in points], [value for _, value in points]
