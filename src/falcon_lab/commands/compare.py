"""``falcon-lab compare``: drafter heads on equal terms."""

from __future__ import annotations

from collections.abc import Callable

import click

from falcon_lab.comparing.page import write_page
from falcon_lab.comparing.plan import Plan
from falcon_lab.comparing.stage import compare
from falcon_lab.comparing.table import format_comparison
from falcon_lab.reporting.results import write_results


def compare_heads(plan: Plan, announce: Callable[[str], None]) -> None:
    """Compare, print the tables, and write the results and the report into the plan's folder."""
    results = compare(plan, announce)
    click.echo(format_comparison(results))
    into = write_results(plan.folder / f"{plan.base.name}.json", results)
    report = write_page(plan.folder / f"{plan.base.name}.html", results)
    click.echo(f"\nreport   {report}\nresults  {into}")
