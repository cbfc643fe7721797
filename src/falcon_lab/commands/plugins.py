"""``plugins`` and ``new-plugin``: what is installed, and the beginning of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from falcon_lab.commands.arguments import FOLDER
from falcon_lab.commands.streams import terminal_width
from falcon_lab.plugins.discovery import load_components
from falcon_lab.report.tables import Column, Table
from falcon_lab.scaffolding.plugin import KINDS, write_plugin

COLUMNS = [
    Column("kind", "kind", left=True),
    Column("name", "name", left=True),
    Column("from", lambda row: f"{row['distribution']} {row['version']}", left=True),
    Column("options", lambda row: options_of(row["options"]), left=True),
]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--strict", is_flag=True, help="Exit with 1 when a plug-in did not load.")
def plugins(as_json: bool, strict: bool) -> None:
    """List every component with its options, and what did not load."""
    components = load_components().usable()
    failures = components.failures
    if as_json:
        listing = {"components": components.listing(), "failures": [asdict(f) for f in failures]}
        click.echo(json.dumps(listing, indent=2, default=str))
    else:
        notes = [f"{failure}" for failure in failures]
        rows = [
            {**row, "name": components.called(row["kind"], row["full_name"])}
            for row in components.listing()
        ]
        table = Table(COLUMNS, rows, notes)
        click.echo(table.text(terminal_width()))
    click.get_current_context().exit(1 if strict and failures else 0)


def options_of(options: Mapping[str, Any]) -> str | None:
    """Return options as a YAML writes them, ``???`` where a value must be given."""
    shown = (
        f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for name, value in options.items()
    )
    return " ".join(shown) or None


@click.command("new-plugin")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="drafter",
    show_default=True,
    help="What the component is.",
)
@click.option("--into", type=FOLDER, default=Path(), help="The folder that gets its folder.")
def new_plugin(name: str, kind: str, into: Path) -> None:
    """Write a distribution with a component that works, to begin your own from.

    It can be installed as it is, passes its own test, and is listed by falcon-lab plugins.
    """
    folder = write_plugin(name, kind, into, load_components())
    click.echo(f"wrote {folder}; next: pip install -e {folder} && python -m pytest {folder}/tests")
