"""Train drafters for ``tiny-code``, export them, and write down what engines must find.

    python benchmarks/interop/prepare.py WORK HEAD…

``WORK/case.json`` has the prompts, our plain greedy texts, and for each head its rounds as a chain
and what it drafts first after every token.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

PROMPTS, NEW, DEPTH = 12, 128, 4
TRAINING = (
    "data.documents=400",
    "glancing.name=none",
    "stages=[target,data,distil]",
    "evaluation.methods={}",
    "wandb.mode=disabled",
    "trainer.max_steps=150",
    "trainer.accelerator=cpu",
)
OF_TOKENS = ("objective.feature=0", "objective.soft=1", "objective.hard=0")
HEADS: dict[str, tuple[str, ...]] = {
    "eagle3": ("drafter.name=eagle3", *OF_TOKENS, "distillation.unroll=3"),
    "eagle": ("drafter.name=eagle", "drafter.form=published"),
    "medusa": ("drafter.name=medusa", "drafter.block=4", *OF_TOKENS),
    "dflash": ("drafter.name=dflash", "drafter.block=4", *OF_TOKENS),
    "sps": ("drafter.name=sps", *OF_TOKENS),
}
FORMATS = {"eagle3": ("vllm", "speculators"), "sps": ("vllm", "transformers")}
WRONG = "wrong"
"""Ends the name of a folder whose layer ids are off by one."""


def trained(head: str, work: Path) -> Path:
    """Return the folder of a head's drafter, trained unless it is there."""
    from falcon_lab.config.load import load_experiment
    from falcon_lab.experiment import run

    out = work / "runs" / head
    if not (out / "drafter" / "config.json").exists():
        words = [*TRAINING, *HEADS[head], f"out={out}", f"name={head}"]
        run(load_experiment(None, words), announce=print)
    return out / "drafter"


def prepared(heads: list[str], work: Path) -> dict[str, Any]:
    """Return the case, with all folders written."""
    import torch

    from falcon_lab.config.load import load_experiment
    from falcon_lab.decoding.assembling import assemble
    from falcon_lab.decoding.plain import PlainEngine
    from falcon_lab.drafters.saved import load_drafter
    from falcon_lab.export.folder import Export
    from falcon_lab.measure.engines import Setup
    from falcon_lab.plugins.discovery import load_components
    from falcon_lab.pretraining.target import place_of_target
    from falcon_lab.testing import write

    components = load_components()
    words = [f"evaluation.prompts.limit={PROMPTS}", "evaluation.methods={}"]
    experiment = load_experiment(None, words)
    folders = {head: trained(head, work) for head in heads}
    setup = Setup.load(experiment, components, print)
    target, place = setup.target, place_of_target(experiment.target, components)
    prompts = [prompt.tokens([]).tolist() for prompt in setup.prompts()]
    plain = [write(PlainEngine(target), prompt, NEW).tokens for prompt in prompts]
    case: dict[str, Any] = {
        **{"target": place, "prompts": prompts, "texts": plain, "new": NEW, "heads": {}}
    }
    for head, folder in folders.items():
        drafter = load_drafter(folder, target, components)
        parts = {"tree": {"name": "chain", "depth": DEPTH}}
        parts |= {"acceptance": {"name": "greedy"}, "controller": {"name": "fixed"}}
        found = [write(assemble(target, drafter, parts, components), p, NEW) for p in prompts]
        assert [each.tokens for each in found] == plain, f"{head} is not lossless"
        exports = {}
        for name in FORMATS.get(head, ("vllm",)):
            out = work / "exports" / f"{head}-{name}"
            Export.of(folder, name, target, place, components, DEPTH).write(out)
            exports[name] = str(out)
            if wrong := off_by_one(out):
                exports[f"{name}-{WRONG}"] = str(wrong)
        case["heads"][head] = {
            "draft_tokens": DEPTH,
            "rounds": sum(len(each.rounds) for each in found),
            "accepted": sum(r.accepted for each in found for r in each.rounds),
            "exports": exports,
            "taps": list(drafter.taps),
        }
    with torch.no_grad():
        if "eagle3" in folders:
            drafter = load_drafter(folders["eagle3"], target, components)
            rows = [
                first_drafts(target, drafter, [*p, *t]) for p, t in zip(prompts, plain, strict=True)
            ]
            case["heads"]["eagle3"]["first"] = rows
    return case


def first_drafts(target: Any, drafter: Any, tokens: list[int]) -> list[int]:
    """Return what EAGLE-3's head drafts first after every token of a text but the first."""
    import torch

    from falcon_lab.interfaces import Frontier, Observation

    ids = torch.tensor(tokens)
    states = target.model(ids[None], output_hidden_states=True).hidden_states
    taps = torch.stack([states[tap][0] for tap in drafter.taps], dim=1)
    found = []
    drafter.reset(ids[0])
    for t in range(1, len(tokens)):
        drafter.observe(Observation(ids[t : t + 1], None, taps=taps[t - 1 : t]))
        found.append(int(drafter.draft(Frontier.root(ids.device)).logits[0, 0].argmax()))
    return found


def off_by_one(folder: Path) -> Path | None:
    """Return a copy of an export whose layer ids are one too low; None where it has none."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    key = "eagle_aux_hidden_state_layer_ids"
    if key in config:
        config[key] = [each - 1 for each in config[key]]
    elif "dflash_config" in config:
        ids = config["dflash_config"]["target_layer_ids"]
        config["dflash_config"]["target_layer_ids"] = [each + 1 for each in ids]
    else:
        return None
    wrong = folder.with_name(f"{folder.name}-{WRONG}")
    shutil.rmtree(wrong, ignore_errors=True)
    shutil.copytree(folder, wrong)
    (wrong / "config.json").write_text(json.dumps(config), "utf-8")
    return wrong


def main(arguments: list[str]) -> None:
    """Write ``case.json``."""
    work = Path(arguments[0]).resolve()
    work.mkdir(parents=True, exist_ok=True)
    case = prepared(arguments[1:] or list(HEADS), work)
    (work / "case.json").write_text(json.dumps(case), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
