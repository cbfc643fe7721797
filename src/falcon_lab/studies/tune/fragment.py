"""Write the tuned tree as a YAML that configurations include. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from falcon_lab.files import replacing

HEADER = """\
# A tree for {drafter} on {machine}, tuned by falcon-lab on {date}: {tokens:.2f} tokens in
# {milliseconds:.2f} ms a round are expected.
#
#     lightning run EXPERIMENT.yaml {name}
#     falcon-lab bench --drafter DRAFTER --tree {name}
"""


def fragment(results: Mapping[str, Any], name: str) -> str:
    """Return the text of a YAML with the tuned tree.

    Args:
        results: of ``tune``.
        name: of the file, for the comment.
    """
    found = results["tune"]
    estimate = found["predicted"][found["chosen"]]
    rows = results["experiment"]["evaluation"]["methods"]
    head = HEADER.format(
        drafter=Path(rows[found["chosen"]]["drafter_path"] or "the drafter").name,
        machine=results["hardware"]["gpu"] or results["hardware"]["cpu"],
        date=results["date"][:10],
        tokens=estimate["tau"],
        milliseconds=estimate["milliseconds"],
        name=name,
    )
    # JSON in one line is YAML too, and quotes the zeros of paths.
    nodes = [f"{key}: {json.dumps(found[key])}\n" for key in ("tree", "controller")]
    if threads := results["experiment"]["evaluation"]["threads"]:
        nodes.append(f"evaluation: {json.dumps({'threads': threads})}\n")
    return head + "".join(nodes)


def write_fragment(path: Path, results: Mapping[str, Any]) -> Path:
    """Write the file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(fragment(results, path.name), encoding="utf-8")
    return path
