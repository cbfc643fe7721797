"""Decode with exported drafters in vLLM, greedily in float32; runs in its environment.

PYTHON in_vllm.py CASE.json OUT.json HEAD:EXPORT…
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from exports import ask_each

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

PROPOSER = "falcon_lab_serving.vllm.FalconLabProposer"
COUNTERS = {
    "rounds": "num_drafts",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
}


def counters(llm: Any) -> dict[str, int]:
    """Return what vLLM has counted so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {key: int(found.get(f"vllm:spec_decode_{part}", 0)) for key, part in COUNTERS.items()}


def listen() -> list[list[int]]:
    """Return a list to which all draft tokens are added; one sequence is decoded at a time."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    heard: list[list[int]] = []
    propose = GPUModelRunner.propose_draft_token_ids

    def heard_too(runner: Any, *given: Any, **named: Any) -> Any:
        drafts = propose(runner, *given, **named)
        listed = drafts if isinstance(drafts, list) else drafts.tolist()
        heard.extend(list(map(int, each)) for each in listed[:1])
        return drafts

    GPUModelRunner.propose_draft_token_ids = heard_too
    return heard


def decoded(case: dict[str, Any], head: str, name: str, heard: list[list[int]]) -> dict[str, Any]:
    """Return the texts of one export, what was drafted, and what was counted."""
    from vllm import LLM, SamplingParams

    told = case["heads"][head]
    model = told["exports"][name]
    if told["method"] == "custom_class":
        os.environ["FALCON_LAB_SERVED_DRAFTER"] = model
        model = PROPOSER
    llm = LLM(
        model=case["target"],
        dtype="float32",
        speculative_config={
            "method": told["method"],
            "model": model,
            "num_speculative_tokens": told["draft_tokens"],
        },
        enforce_eager=True,
        max_model_len=max(map(len, case["prompts"])) + case["new"] + 16,
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=case["new"], ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    before = counters(llm)
    outputs, drafts = [], []
    for prompt in prompts:
        heard.clear()
        outputs += llm.generate(prompt, sampling, use_tqdm=False)
        drafts.append(list(heard))
    counted = {key: value - before[key] for key, value in counters(llm).items()}
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {"texts": texts, "drafts": drafts, **counted}


def released() -> None:
    """Forget the engine before the next one."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def main(arguments: list[str]) -> None:
    """Write texts and counters after every export."""
    case = json.loads(Path(arguments[0]).read_text("utf-8"))
    known = ("vllm", "vllm-cpu", "torch", "transformers")
    versions = {each.metadata["Name"]: each.version for each in distributions()}
    found = {"versions": {name: versions[name] for name in known if name in versions}}
    heard = listen()

    def ask(head: str, name: str) -> dict[str, Any]:
        try:
            return decoded(case, head, name, heard)
        finally:
            released()

    ask_each(arguments[2:], found, Path(arguments[1]), ask)


if __name__ == "__main__":
    main(sys.argv[1:])
