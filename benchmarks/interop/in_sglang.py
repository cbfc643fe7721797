"""Decode with exported drafters in SGLang, greedily in float32 on a CPU; runs in its environment.

    PYTHON in_sglang.py CASE.json OUT.json HEAD:EXPORT…

SGLang's own code schedules, drafts, verifies and samples; ``sglang_kernels.py`` stands for the
compiled kernels that no package registry has for a CPU, and there is no torchvision.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than these texts

import sglang_kernels
from exports import ask_each
from transformers.utils import is_torchvision_available

KNOWN = ("sglang", "torch", "transformers")
ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE"}
"""What SGLang calls the methods of vLLM that it has on a CPU too; DFlash it refuses there."""
IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


def stand_in() -> None:
    """Make importable what SGLang imports and this environment has not; every process does."""
    for name in ("sgl_kernel", "sgl_kernel.speculative"):
        sys.modules[name] = sglang_kernels
    if not is_torchvision_available():
        made = [ModuleType(name) for name in IMAGES]
        for module, inner in pairwise(made):
            setattr(module, inner.__name__.rpartition(".")[2], inner)
            inner.InterpolationMode = None  # type: ignore[attr-defined]
        sys.modules.update(zip(IMAGES, made, strict=True))


stand_in()


def arguments_of(case: dict[str, Any], told: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a server is started with."""
    common = {
        "model_path": case["target"],
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "intel_amx",
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "max_running_requests": 1,
        "context_length": max(map(len, case["prompts"])) + case["new"] + 16,
        "max_total_tokens": 4096,
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    common["speculative_num_draft_tokens"] = told["draft_tokens"] + 1
    if told["method"] == "custom_class":
        return {
            **common,
            "speculative_algorithm": "FALCON_LAB",
            "enable_return_hidden_states": True,
        }
    return {
        **common,
        "speculative_algorithm": ALGORITHMS[told["method"]],
        "speculative_draft_model_path": told["exports"][name],
        "speculative_num_steps": told["draft_tokens"],
        "speculative_eagle_topk": 1,
    }


def decoded(case: dict[str, Any], head: str, name: str, seen: Path) -> dict[str, Any]:
    """Return the texts of one export, what was drafted, and what SGLang counted."""
    import sglang
    from sglang.srt.runtime_context import override_platform

    told = case["heads"][head]
    if told["method"] == "custom_class":
        os.environ["FALCON_LAB_SERVED_DRAFTER"] = told["exports"][name]
        chain = {"name": "chain", "depth": told["draft_tokens"]}
        os.environ["FALCON_LAB_SERVED_TREE"] = json.dumps(chain)
    with override_platform(has_amx=True):  # or it takes another attention, which verifies nothing
        engine = sglang.Engine(**arguments_of(case, told, name))
    sampling = {"temperature": 0, "max_new_tokens": case["new"], "ignore_eos": True}
    found: dict[str, Any] = {"texts": [], "drafts": [], "rounds": 0, "accepted": 0}
    try:
        for prompt in case["prompts"]:
            seen.write_text("", "utf-8")
            output = engine.generate(input_ids=prompt, sampling_params=sampling)
            counted = output["meta_info"]
            rounds = [json.loads(line) for line in seen.read_text("utf-8").splitlines()]
            found["texts"].append(output["output_ids"])
            found["drafts"].append(rounds)
            found["rounds"] += counted["spec_verify_ct"]
            found["accepted"] += counted["spec_num_correct_drafts"]
    finally:
        engine.shutdown()
    return found


def main(arguments: list[str]) -> None:
    """Write texts and counters after every export."""
    case, out = json.loads(Path(arguments[0]).read_text("utf-8")), Path(arguments[1])
    seen = out.with_name("sglang-rounds.jsonl")
    os.environ[sglang_kernels.VERIFIED] = str(seen)

    def ask(head: str, name: str) -> dict[str, Any]:
        return decoded(case, head, name, seen)

    ask_each(arguments[2:], {"versions": {name: version(name) for name in KNOWN}}, out, ask)


if __name__ == "__main__":
    main(sys.argv[1:])
