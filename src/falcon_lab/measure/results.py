"""Write and read ``results.json``: everything that was measured and under which conditions.

``docs/results-schema.md`` says what every key means; a test holds the two together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.saved import RESULTS
from falcon_lab.config.schema import HF_GENERATE, PLAIN
from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_place, keep_former, write_atomically
from falcon_lab.measure import metrics
from falcon_lab.measure.records import Record
from falcon_lab.measure.results_shape import Results
from falcon_lab.stored import read_checked, read_json

if TYPE_CHECKING:
    from falcon_lab.measure.measurement import Measurement

SCHEMA_VERSION = 1


def build_results(
    measurement: Measurement,
    *,
    experiment: Mapping[str, Any],
    target: Mapping[str, Any],
    header: Mapping[str, Any],
    components: Mapping[str, Any] | None = None,
    headline: str | None = None,
    labels: Mapping[str, str] | None = None,
    left_out: Mapping[str, str] | None = None,
    trees: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the whole of ``results.json``.

    Args:
        measurement: from ``measure``.
        experiment: the resolved experiment as plain values.
        target: ``name``, ``revision``, ``fingerprint``, ``dtype``, ``quality`` (None, or what
            the gate found: at least ``passed`` and ``verdict``) and ``tuning`` (of a tuned one).
        header: from ``provenance.header``.
        components: method -> kind -> name, distribution and version.
        headline: the method that the first sentence of the report and the sweep's metric are
            about; None: the fastest lossless one of those that use the run's own drafter, if
            any does.
        labels: method -> what it is, in a few words.
        left_out: method -> why it was not measured.
        trees: drawn trees, from ``TreeRecorder``.
    """
    summaries = metrics.summaries(measurement.records, measurement.lossless)
    if headline is None:
        headline = _fastest(summaries, _own_methods(experiment))
    elif headline not in summaries:
        raise ValueError(f"headline method {headline!r} was not measured")
    return {
        "schema": SCHEMA_VERSION,
        "name": experiment.get("name"),
        "experiment": dict(experiment),
        "seeds": _seeds(experiment),
        **header,
        "target": dict(target),
        "components": dict(components or {}),
        "protocol": {"repeats": measurement.repeats, "warmup": measurement.warmup},
        "headline": headline,
        "labels": dict(labels or {}),
        "left_out": dict(left_out or {}),
        "methods": {name: asdict(summary) for name, summary in summaries.items()},
        "comparisons": [asdict(found) for found in metrics.comparisons(measurement.records)],
        "trees": [dict(tree) for tree in trees],
        "rows": [record.as_dict() for of in measurement.records.values() for record in of],
    }


def _fastest(summaries: Mapping[str, metrics.MethodSummary], own: Sequence[str]) -> str | None:
    rivals = [s for name, s in summaries.items() if name not in (PLAIN, HF_GENERATE)]
    rivals = [s for s in rivals if s.method in own] or rivals
    rivals = [s for s in rivals if s.lossless] or rivals
    best = max(rivals, key=lambda s: s.tokens_per_second, default=None)
    return best.method if best else None


def _own_methods(experiment: Mapping[str, Any]) -> list[str]:
    """List the methods that use the drafter which the run itself trained."""
    methods = (experiment.get("evaluation") or {}).get("methods") or {}
    return [n for n, m in methods.items() if not (m.get("drafter") or m.get("drafter_path"))]


def _seeds(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return every seed by the section that names it; ``run`` is the experiment's own."""
    seeds = {"run": experiment.get("seed")}
    for section in ("data", "evaluation"):
        seeds[section] = (experiment.get(section) or {}).get("seed")
    return seeds


def records_of(results: Mapping[str, Any], method: str) -> list[Record]:
    """Return one method's records, as they were measured."""
    return [Record.from_dict(node) for node in results["rows"] if node["method"] == method]


def write_results(path: Path, results: Mapping[str, Any]) -> Path:
    """Write the file whole or not at all.

    Raises:
        FalconLabError: when it cannot be written; what was there before is still there.
    """
    text = json.dumps(_finite(results), indent=1, ensure_ascii=False, allow_nan=False)
    return write_atomically(path, text + "\n")


@dataclass(frozen=True)
class AnyResults:
    """What every file of results has: of an evaluation, a comparison, a tuning or a benchmark."""

    experiment: dict[str, Any]
    versions: dict[str, str | None]


def refuse_foreign(path: Path) -> None:
    """Refuse a place for results that cannot be written, or where a file holds none.

    Raises:
        FalconLabError: with what is wrong with it.
    """
    check_place(path, folder=False)
    if path.exists():
        what = "results of falcon-lab, and would be replaced by some"
        read_json(path, AnyResults, what, "name another file, or move this one")


def replace_results(
    path: Path,
    results: Mapping[str, Any],
    beside: Sequence[Path] = (),
    *,
    announce: Callable[[str], None],
) -> Path:
    """Write results in place of earlier ones; those of other settings are kept.

    Args:
        path: the file.
        results: its content.
        beside: what was made of the earlier results, and is kept with them.
        announce: is called with one line for the user.

    Raises:
        FalconLabError: when it cannot be written; what was there before is still there.
    """
    if not _of_the_same_settings(path, results) and (former := keep_former(path, *beside)):
        announce(f"the former results were of other settings and are kept: {former}")
    return write_results(path, results)


def _of_the_same_settings(path: Path, results: Mapping[str, Any]) -> bool:
    try:
        former = read_checked(path, AnyResults, "results", "")
    except FalconLabError:  # none, or somebody else's
        return False
    return _settings(former) == _settings(_finite(results))


DECIDE = (
    *("seed", "target", "data", "drafter", "tree", "acceptance", "controller"),
    *("decoding", "evaluation"),
)
"""Sections of an experiment that decide what is measured."""
OF_STUDIES = ("comparison", "sizes")
"""Keys of a study's results that do."""


def _settings(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decided some results, as plain values."""
    experiment = {key: results["experiment"].get(key) for key in DECIDE}
    methods = sorted(results.get("methods") or ())
    if tuning := results.get("tune"):  # which adds methods, and chooses the threads
        tuned = {"threads": None, "methods": None}
        experiment["evaluation"] = {**(experiment["evaluation"] or {}), **tuned}
        methods = tuning.get("limits")
    return {**experiment, "methods": methods, **{key: results.get(key) for key in OF_STUDIES}}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not know, by null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)  # a path, a dtype


def load_results(path: Path) -> dict[str, Any]:
    """Read ``results.json``, or the one in the folder ``path``.

    Raises:
        FalconLabError: for a missing, cut off or foreign file.
    """
    if path.is_dir():
        path = path / RESULTS
    again = "run the evaluate stage again"
    what = "results of an evaluation"
    if not path.exists():
        raise FalconLabError(f"{path}: no {what} yet; run the evaluate stage first")
    results = read_checked(path, Results, what, again)
    if results["schema"] != SCHEMA_VERSION:
        raise FalconLabError(
            f"{path}: schema {results['schema']!r}, this version reads {SCHEMA_VERSION}; {again}"
        )
    return results
