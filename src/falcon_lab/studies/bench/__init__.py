"""What a benchmark can compare, by the names that the command line knows. Imports no torch."""

from __future__ import annotations

from falcon_lab.config.schema import PLAIN

HF = "hf"
HF_STATIC = "hf-static"
HF_ASSISTED = "hf-assisted"
HF_LOOKUP = "hf-lookup"
LLAMA_CPP = "llama-cpp"
DRAFTER = "drafter"

METHODS: dict[str, str] = {
    HF: "HF generate",
    HF_STATIC: "HF static cache",
    HF_ASSISTED: "HF assisted",
    HF_LOOKUP: "HF prompt lookup",
    LLAMA_CPP: "llama.cpp",
    PLAIN: "plain",
    DRAFTER: "the drafter's trees",
}
"""Method -> name of its row. ``plain``, the baseline, is always measured; naming it adds the
same loop through the target's other forward pass. ``drafter`` is a row for each tree; ``llama-cpp``
is there where the target is a GGUF file."""
