"""Read an exported EAGLE-3 head by speculators' own class; runs in its environment.

PYTHON in_speculators.py CASE.json OUT.json
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import AutoModelForCausalLM


def drafted(model: Any, target: Any, taps: list[int], tokens: list[int]) -> list[int]:
    """Return the first draft after every token of a text but the first."""
    ids = torch.tensor(tokens)[None]
    states = target(ids, output_hidden_states=True).hidden_states
    layers = torch.cat([states[tap] for tap in taps], dim=-1)[:, :-1]
    documents = torch.zeros_like(ids[:, 1:])
    [first] = model(layers, ids[:, 1:], documents, ttt_steps=1)
    found: list[int] = first[0].tolist()
    return found


@torch.no_grad()
def main(arguments: list[str]) -> None:
    """Write what was found."""
    case = json.loads(Path(arguments[0]).read_text("utf-8"))
    head = case["heads"]["eagle3"]
    target = AutoModelForCausalLM.from_pretrained(case["target"], dtype=torch.float32)
    found: dict[str, Any] = {"versions": {n: version(n) for n in ("speculators", "torch")}}
    for name in ("speculators", "speculators-wrong"):
        folder = Path(head["exports"][name])
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config["transformer_layer_config"]["_attn_implementation"] = "eager"
        model = Eagle3DraftModel.from_pretrained(folder).float().eval()
        ours, theirs = load_file(folder / "model.safetensors"), model.state_dict()
        equal = [n for n in ours if n in theirs and torch.equal(theirs[n].cpu(), ours[n])]
        taps = model.config.eagle_aux_hidden_state_layer_ids
        texts = [[*p, *t] for p, t in zip(case["prompts"], case["texts"], strict=True)]
        rows = [drafted(model, target, taps, text) for text in texts]
        same = [
            sum(a == b for a, b in zip(row, expected, strict=True))
            for row, expected in zip(rows, head["first"], strict=True)
        ]
        found[name] = {
            "unexpected": sorted(set(ours) - set(theirs)),
            "missing": sorted(set(theirs) - set(ours)),
            "different": sorted(set(ours) - set(equal)),
            "layer_ids": list(taps),
            "drafts": sum(map(len, rows)),
            "same_drafts": sum(same),
        }
    Path(arguments[1]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
