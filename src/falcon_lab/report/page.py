"""What every page has: its frame, its lists, and where its figures come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any


def page(title: str, body: str) -> str:
    """A whole HTML file that opens anywhere, without network."""
    style = files("falcon_lab.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · falcon-lab</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def header(kicker: str, headline: str, lead: str) -> str:
    """The top of a page."""
    return (
        f'<header><p class="kicker">falcon-lab · {escape(kicker)}</p>\n'
        f"<h1>{escape(headline)}</h1>\n"
        f'<p class="lead">{escape(lead)}</p></header>'
    )


def banner(warnings: list[str]) -> str:
    """What must be read first."""
    items = "".join(f"<li>{escape(line)}</li>" for line in warnings)
    return f'<div class="warning"><strong>Read this first</strong><ul>{items}</ul></div>'


def listing(items: Mapping[str, Any]) -> str:
    """Terms with what they mean."""
    lines = [f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in items.items()]
    return f"<dl>{''.join(lines)}</dl>"


def folded(summary: str, content: Any) -> str:
    """Plain values that open on a click."""
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def origin_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Where figures come from: target, command, machine and versions."""
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
