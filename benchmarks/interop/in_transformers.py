"""Generate by transformers with drafters, greedily in float32; runs where falcon-lab is installed.

PYTHON in_transformers.py CASE.json OUT.json

Every drafter runs inside ``model.generate`` as ``custom_generate``; a draft model's export is also
an ``assistant_model`` of transformers' own.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from falcon_lab.export.generate import Speculation


def generated(case: dict[str, Any], target: Any, **given: Any) -> list[list[int]]:
    """Return the texts of all prompts."""
    found = []
    for prompt in case["prompts"]:
        output = target.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=case["new"],
            do_sample=False,
            **given,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


@torch.no_grad()
def main(arguments: list[str]) -> None:
    """Write what was found."""
    case = json.loads(Path(arguments[0]).read_text("utf-8"))
    target = AutoModelForCausalLM.from_pretrained(case["target"], dtype=torch.float32)
    ends = {"eos_token_id": None, "pad_token_id": 0}  # as texts here go on behind an end
    found: dict[str, Any] = {
        "versions": {name: version(name) for name in ("transformers", "torch")},
        "heads": {},
    }
    for head, told in case["heads"].items():
        chain = "tree.name=chain", f"tree.depth={told['draft_tokens']}"
        speculation, rounds = Speculation(told["drafter"], *chain), 0
        texts = []
        for prompt in case["prompts"]:
            one = {**case, "prompts": [prompt]}
            texts += generated(one, target, custom_generate=speculation, **ends)
            rounds += sum(len(each.rounds) for each in speculation.generations)
        row = {"texts": texts, "rounds": rounds}
        found["heads"][head] = {"custom_generate": row}
        if "transformers" in told["exports"]:
            draft = AutoModelForCausalLM.from_pretrained(told["exports"]["transformers"])
            texts = generated(case, target, assistant_model=draft.float(), **ends)
            found["heads"][head]["assistant_model"] = {"texts": texts}
    Path(arguments[1]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
