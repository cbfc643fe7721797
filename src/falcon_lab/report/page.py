"""Pages and cards from the templates beside this file.

HTML is escaped but for our own plots and tables, so that no name, text or token is taken for
markup; a page is one file that opens anywhere, without network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates() -> Environment:
    """Return the environment of all templates; a name that a template lacks is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    found = Environment(
        loader=PackageLoader("falcon_lab", "report/templates"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters["json"] = _json
    return found


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def render(template: str, **data: Any) -> str:
    """Fill a template.

    Args:
        template: its file's name; a page extends ``base.html``, which names what it needs.
        data: what it shows.
    """
    return templates().get_template(template).render(**data)


def origin_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return where figures come from: target, command, machine and versions."""
    h, git, target = results["hardware"], results["git"], results["target"] or {}
    commit = "not in a git repository"
    if git:
        commit = git["commit"] + (", with uncommitted changes" if git["dirty"] else "")
    return {
        "target": f"{target.get('name')} (revision {target.get('revision')}, fingerprint "
        f"{target.get('fingerprint')})",
        "command": results["command"],
        "date": results["date"],
        "machine": f"{h['cpu']}, {h['cores']} cores, {h['system']}",
        "GPU": h["gpu"] or "none",
        "threads": h["threads"],
        "load": f"{h['load']} processes in the last minute" if h["load"] is not None else "unknown",
        "dtype": h["dtype"],
        "git": commit,
        "versions": ", ".join(f"{k} {v}" for k, v in results["versions"].items() if v),
    }
