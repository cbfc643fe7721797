"""Published figures beside ours: is their order reproduced?

A paper's figures come from another target, machine and training; what can be checked is which
method comes out ahead of which. For every two rows of a table the answer is by a bootstrap over
our training seeds and prompts: *reproduced* when the whole interval of our ratio lies on the
paper's side of 1, *not reproduced* when it lies on the other, and *not clear* between.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

from falcon_lab.errors import ConfigError, did_you_mean
from falcon_lab.studies.compare.plan import ComparisonConfig, PaperConfig, parse_budget

if TYPE_CHECKING:
    from falcon_lab.measure.statistics import Interval

METRICS = ("speedup", "tau", "tau_draft", "alpha")
LABELS = {"speedup": "speed-up", "tau": "τ", "tau_draft": "τ draft", "alpha": "α %"}
"""Metric -> what tables call it."""
REPRODUCED, REVERSED, UNCLEAR = "reproduced", "not reproduced", "not clear"
UNMEASURED, DIVIDED = "not measured", "the paper's columns disagree"

Ratio = Callable[[str, tuple[str, str], tuple[str, str]], "Interval | None"]
"""Metric and two rows (head, budget) -> ours of the first over the second; None unless measured."""


def row_of(name: str, paper: PaperConfig) -> tuple[str, str]:
    """Parse head and budget of a table's row: ``falcon``, or ``falcon chain-8``."""
    head, _, budget = name.partition(" ")
    return head, budget or paper.budget


def check_paper(config: ComparisonConfig) -> None:
    """See that all that is named is measured.

    Raises:
        ConfigError: a metric, head, budget or temperature that the comparison does not have.
    """
    paper = config.paper
    if paper is None:
        return
    if paper.temperature not in config.temperatures:
        problem = f"is {paper.temperature:g}, which is none of {config.temperatures}"
        raise ConfigError("paper.temperature", problem)
    for metric, columns in paper.published.items():
        key = f"paper.published.{metric}"
        if metric not in METRICS:
            raise ConfigError(key, f"no metric {metric!r}{did_you_mean(metric, METRICS)}")
        for column, figures in columns.items():
            for name in figures:
                _check_row(name, f"{key}.{column}.{name}", config, paper)


def _check_row(name: str, key: str, config: ComparisonConfig, paper: PaperConfig) -> None:
    head, budget = row_of(name, paper)
    if head not in config.heads:  # one that ``only`` leaves out is not measured, and said so
        raise ConfigError(key, f"no head {head!r}{did_you_mean(head, config.heads)}")
    parse_budget(budget, key)
    if budget not in config.budgets:
        raise ConfigError(key, f"budget {budget!r} is none of {', '.join(config.budgets)}")


def compare_with_published(
    paper: PaperConfig, ours: Callable[[str, str, str], Mapping[str, Any] | None], ratio: Ratio
) -> dict[str, Any]:
    """Return the paper's tables with our figures, and whether their order is reproduced.

    Args:
        paper: the published figures.
        ours: metric, head and budget -> our value with its interval; None unless measured.
        ratio: compares two rows.
    """
    metrics = [
        _metric(metric, columns, paper, ours, ratio) for metric, columns in paper.published.items()
    ]
    return {
        "source": paper.source,
        "temperature": paper.temperature,
        "notes": list(paper.notes),
        "metrics": metrics,
    }


def _metric(
    metric: str,
    columns: Mapping[str, Mapping[str, float]],
    paper: PaperConfig,
    ours: Callable[[str, str, str], Mapping[str, Any] | None],
    ratio: Ratio,
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    rows = []
    for name in names:
        head, budget = row_of(name, paper)
        published = {column: figures.get(name) for column, figures in columns.items()}
        own = ours(metric, head, budget)
        rows.append(
            {
                "row": name,
                "head": head,
                "budget": budget,
                "published": published,
                "ours": None if own is None else dict(own),
            }
        )
    found = (_pair(metric, a, b, columns, paper, ratio) for a, b in combinations(names, 2))
    pairs = [pair for pair in found if pair is not None]
    return {"metric": metric, "rows": rows, "pairs": pairs, "verdict": verdict_of(pairs)}


def _pair(
    metric: str,
    first: str,
    second: str,
    columns: Mapping[str, Mapping[str, float]],
    paper: PaperConfig,
    ratio: Ratio,
) -> dict[str, Any] | None:
    """Two rows, the one that the paper has ahead first; None where no column has both."""
    both = [(f[first], f[second]) for f in columns.values() if first in f and second in f]
    if not both:
        return None
    ahead, behind = sum(a > b for a, b in both), sum(a < b for a, b in both)
    if behind > ahead:
        first, second, ahead = second, first, behind
        both = [(b, a) for a, b in both]
    found = ratio(metric, row_of(first, paper), row_of(second, paper))
    ratios = [a / b for a, b in both if b]
    return {
        "above": first,
        "below": second,
        "columns": len(both),
        "agreeing": ahead,
        "published": [min(ratios), max(ratios)] if ratios else None,
        "ours": None if found is None else asdict(found),
        "verdict": DIVIDED if ahead < len(both) else verdict(found),
    }


def verdict(ours: Interval | None) -> str:
    """Judge by our ratio whether the row that the paper has ahead is ahead."""
    if ours is None:
        return UNMEASURED
    if ours.low is None or ours.high is None:
        return UNCLEAR
    if ours.low > 1:
        return REPRODUCED
    return REVERSED if ours.high < 1 else UNCLEAR


def verdict_of(pairs: list[dict[str, Any]]) -> str:
    """Judge the order as a whole: it is as good as its worst pair."""
    found = {pair["verdict"] for pair in pairs}
    for worst in (REVERSED, UNCLEAR, REPRODUCED):
        if worst in found:
            return worst
    return UNMEASURED
