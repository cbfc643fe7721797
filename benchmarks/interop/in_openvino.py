"""Decode with exported drafters in OpenVINO GenAI, greedily in float32; runs in its environment.

PYTHON in_openvino.py CASE.json OUT.json HEAD:EXPORT…

The exporter of optimum-intel converts the target and every export, by the commands of their cards.
OpenVINO does not tell draft tokens: what it tells of a round is how many tokens it added.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai
from exports import ask_each

PRECISE = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "INFERENCE_NUM_THREADS": 1,
}
LAYERS = "hidden_layers_list"
TOKENIZERS = "openvino_*tokenizer.*"
KNOWN = ("openvino", "openvino-genai", "optimum-intel", "torch", "transformers")


def converted(folder: Path, out: Path) -> Path:
    """Return a folder as OpenVINO reads it, after it was written."""
    words = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    words += ["--trust-remote-code", "-m", str(folder), str(out)]
    program = Path(sys.executable).with_name("optimum-cli")
    subprocess.run([str(program), "export", "openvino", *words], check=True)
    return out


def with_layers(folder: Path, target: Path) -> Path:
    """Return a converted drafter with the layers that its configuration names, and a tokenizer."""
    out = folder.with_name(f"{folder.name}-layers")
    shutil.copytree(folder, out, dirs_exist_ok=True)
    layers = json.loads((folder / "config.json").read_text("utf-8")).get(LAYERS)
    if layers is not None:
        model = openvino.Core().read_model(folder / "openvino_model.xml")
        model.set_rt_info(" ".join(map(str, layers)), LAYERS)
        openvino.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)
    for file in target.glob(TOKENIZERS):
        shutil.copy(file, out)
    return out


def decoded(case: dict[str, Any], target: Path, draft: Path | None, tokens: int) -> dict[str, Any]:
    """Return the texts of one export, and how many tokens every pass of the target added."""
    given = {}
    if draft is not None:
        given["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", **PRECISE)
    pipeline = openvino_genai.LLMPipeline(str(target), "CPU", **PRECISE, **given)
    options = openvino_genai.GenerationConfig()
    options.max_new_tokens, options.ignore_eos, options.do_sample = case["new"], True, False
    if draft is not None:
        options.num_assistant_tokens = tokens
    found: dict[str, Any] = {"texts": [], "added": []}
    for prompt in case["prompts"]:
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        result = pipeline.generate(ids, options)
        found["texts"].append(list(result.tokens[0]))
        found["added"].append(list(result.perf_metrics.raw_metrics.m_batch_sizes))
    return found


def main(arguments: list[str]) -> None:
    """Write texts and passes after every export."""
    case, out = json.loads(Path(arguments[0]).read_text("utf-8")), Path(arguments[1])
    files = out.with_name("openvino")
    shutil.rmtree(files, ignore_errors=True)
    target = converted(Path(case["target"]), files / "target")
    plain = decoded(case, target, None, 0)["texts"]

    def ask(head: str, name: str) -> dict[str, Any]:
        told = case["heads"][head]
        export = Path(told["exports"][name])
        draft = with_layers(converted(export, files / export.name), target)
        return decoded(case, target, draft, told["draft_tokens"])

    versions = {name: version(name) for name in KNOWN}
    ask_each(arguments[2:], {"versions": versions, "plain": plain}, out, ask)


if __name__ == "__main__":
    main(sys.argv[1:])
