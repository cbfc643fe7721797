"""Decode with an exported drafter in vLLM, greedily in float32; runs in its environment.

PYTHON in_vllm.py CASE.json OUT.json HEAD EXPORT
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

METHODS = {"sps": "draft_model"}
COUNTERS = {
    "rounds": "num_drafts",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
}


def main(arguments: list[str]) -> None:
    """Write texts and counters."""
    from vllm import LLM, SamplingParams

    case = json.loads(Path(arguments[0]).read_text("utf-8"))
    head, name = arguments[2], arguments[3]
    told = case["heads"][head]
    speculative = {
        "method": METHODS.get(head, head),
        "model": told["exports"][name],
        "num_speculative_tokens": told["draft_tokens"],
    }
    longest = max(map(len, case["prompts"])) + case["new"] + 16
    llm = LLM(
        model=case["target"],
        dtype="float32",
        speculative_config=speculative,
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=case["new"], ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    outputs = [llm.generate(prompt, sampling)[0] for prompt in prompts]
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    found = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        **{key: metrics.get(f"vllm:spec_decode_{part}") for key, part in COUNTERS.items()},
        "versions": {
            each.metadata["Name"]: each.version
            for each in distributions()
            if each.metadata["Name"] in ("vllm", "vllm-cpu", "torch", "transformers")
        },
    }
    Path(arguments[1]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
