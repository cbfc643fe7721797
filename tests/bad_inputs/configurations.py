"""YAML files that are no experiment, and values that no key takes."""

from __future__ import annotations

from bad_inputs.case import BadInput, write

CASES = [
    BadInput(
        "a YAML with a tab", "run bad.yaml", "bad.yaml:2", "YAML", write("bad.yaml", "a:\n\tb: 1")
    )
]
