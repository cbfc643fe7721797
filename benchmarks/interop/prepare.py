"""Train drafters for ``tiny-code``, export them, and write down what engines must find.

    python benchmarks/interop/prepare.py WORK [OPTION]… [HEAD | HEAD=DRAFTER]…

Instead of a drafter that is trained here, one that is there may be taken
(``eagle3=RUN/drafter``), for the target that it was trained for. ``WORK/case.json`` has the
prompts, our plain greedy texts, and for each head its rounds as a chain and what it drafts first
after every token.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from falcon_lab.config.schema import Experiment

PROMPTS, NEW, DEPTH = 12, 128, 4
TRAINING = (
    "data.documents=200",
    "data.length=256",
    "data.batch_size=4",
    "glancing.name=none",
    "stages=[target,data,distil]",
    "evaluation.methods={}",
    "wandb.mode=disabled",
    "trainer.max_steps=80",
    "trainer.accelerator=cpu",
)
OF_TOKENS = ("objective.feature=0", "objective.soft=1", "objective.hard=0")
SOME_TOKENS = "drafter.draft_vocabulary=128"
WRONG = "wrong"
"""Ends the name of a folder in which something is planted that an engine loads all the same."""

Config = dict[str, Any]
Weights = dict[str, Any]
Mistake = Callable[[Config, Weights], None]


def layer_ids_off_by_one(config: Config, weights: Weights) -> None:
    """Have the layers beside the right ones read."""
    for told in (config, config.get("eagle_config", {})):
        for key in ("eagle_aux_hidden_state_layer_ids", "hidden_layers_list"):
            if key in told:
                told[key] = [each - 1 for each in told[key]]
    if "dflash_config" in config:
        told = config["dflash_config"]
        told["target_layer_ids"] = [each + 1 for each in told["target_layer_ids"]]


def columns_taken_for_tokens(config: Config, weights: Weights) -> None:
    """Have a draft vocabulary mean nothing, as where its map is not read."""
    weights["d2t"] = weights["d2t"] * 0


def halves_exchanged(config: Config, weights: Weights) -> None:
    """Have EAGLE-1's feature where its embedding should be."""
    weights["fc.weight"] = weights["fc.weight"].roll(config["hidden_size"], 1)


def heads_exchanged(config: Config, weights: Weights) -> None:
    """Have Medusa's first head draft what its second should."""
    for name in [each for each in weights if each.startswith("blocks.0.")]:
        other = name.replace("blocks.0.", "blocks.1.")
        weights[name], weights[other] = weights[other], weights[name]


def gates_exchanged(config: Config, weights: Weights) -> None:
    """Have a network of a decoder block gate what is its gate."""
    gate = next(name for name in weights if name.endswith("mlp.gate_proj.weight"))
    up = gate.replace("gate_proj", "up_proj")
    weights[gate], weights[up] = weights[up], weights[gate]


SERVED = "served"
"""Stands for a format: the saved drafter itself, which falcon-lab-serving drafts with."""


class Head(NamedTuple):
    """What is trained, how vLLM calls it, and the mistake that must be seen."""

    words: tuple[str, ...]
    method: str
    mistake: Mistake
    formats: tuple[str, ...] = ("vllm",)


EAGLE3 = ("drafter.name=eagle3", *OF_TOKENS, "distillation.unroll=3")
MEDUSA = ("drafter.name=medusa", "drafter.block=4", *OF_TOKENS)
DFLASH = ("drafter.name=dflash", "drafter.block=4", *OF_TOKENS)
PUBLISHED = ("drafter.name=eagle", "drafter.form=published")
SGLANG = ("vllm", "sglang")
ENGINES = (*SGLANG, "speculators", "openvino")
HEADS: dict[str, Head] = {
    "eagle3": Head(EAGLE3, "eagle3", layer_ids_off_by_one, ENGINES),
    "eagle3-vocabulary": Head((*EAGLE3, SOME_TOKENS), "eagle3", columns_taken_for_tokens, ENGINES),
    "eagle": Head(PUBLISHED, "eagle", halves_exchanged, SGLANG),
    "medusa": Head(MEDUSA, "medusa", heads_exchanged),
    "dflash": Head(DFLASH, "dflash", layer_ids_off_by_one),
    "dflash-vocabulary": Head((*DFLASH, SOME_TOKENS), "dflash", columns_taken_for_tokens),
    "falcon": Head(("drafter.name=falcon",), "custom_class", gates_exchanged, (SERVED,)),
    "sps": Head(
        ("drafter.name=sps", *OF_TOKENS),
        "draft_model",
        gates_exchanged,
        (*SGLANG, "transformers"),
    ),
}


def trained(head: str, work: Path) -> Path:
    """Return the folder of a head's drafter, trained unless it is there."""
    from falcon_lab.config.load import load_experiment
    from falcon_lab.experiment import run

    out = work / "runs" / head
    if not (out / "drafter" / "config.json").exists():
        words = [*TRAINING, *HEADS[head].words, f"out={out}", f"name={head}"]
        run(load_experiment(None, words), announce=print)
    return out / "drafter"


def experiment_of(folders: Iterable[Path], settings: list[str]) -> Experiment:
    """Return the measurement on the target of saved drafters, with some settings."""
    from falcon_lab.config.saved import read_description

    targets = {read_description(folder)["target"]["name"] for folder in folders}
    if len(targets) > 1:
        raise SystemExit(f"the drafters are those of {' and '.join(sorted(targets))}: choose one")
    from falcon_lab.config.load import load_experiment

    words = [f"target.name={targets.pop()}", "target.dtype=float32", "evaluation.methods={}"]
    return load_experiment(None, [*words, *settings])


def prepared(folders: dict[str, Path], work: Path, settings: list[str], new: int) -> dict[str, Any]:
    """Return the case, with all folders written."""
    import torch

    from falcon_lab.decoding.assembling import assemble
    from falcon_lab.decoding.plain import PlainEngine
    from falcon_lab.drafters.saved import load_drafter
    from falcon_lab.export.folder import Export
    from falcon_lab.measure.engines import Setup
    from falcon_lab.model.gguf import converted
    from falcon_lab.plugins.discovery import load_components
    from falcon_lab.pretraining.target import place_of_target
    from falcon_lab.testing import write

    components = load_components()
    experiment = experiment_of(folders.values(), settings)
    setup = Setup.load(experiment, components, print)
    target, place = setup.target, place_of_target(experiment.target, components)
    if place.endswith(".gguf"):  # engines are given the weights that our loader makes of it
        place = str(converted(Path(place), print, lambda config: None))
    prompts = [prompt.tokens([]).tolist() for prompt in setup.prompts()]
    plain = [write(PlainEngine(target), prompt, new).tokens for prompt in prompts]
    reserve_a_token(target, [*prompts, *plain])
    case: dict[str, Any] = {
        **{"target": place, "name": experiment.target.name, "new": new},
        **{"prompts": prompts, "texts": plain, "heads": {}},
    }
    for head, folder in folders.items():
        drafter = load_drafter(folder, target, components)
        parts = {"tree": {"name": "chain", "depth": DEPTH}}
        parts |= {"acceptance": {"name": "greedy"}, "controller": {"name": "fixed"}}
        drafts: list[list[list[int]]] = [[] for _ in prompts]
        found = [
            write(assemble(target, drafter, parts, components), p, new, on_round=kept(drafts[i]))
            for i, p in enumerate(prompts)
        ]
        assert [each.tokens for each in found] == plain, f"{head} is not lossless"
        exports = {}
        for name in HEADS[head].formats:
            out = work / "exports" / f"{head}-{name}"
            if name == SERVED:
                shutil.rmtree(out, ignore_errors=True)
                shutil.copytree(folder, out)
            else:
                Export.of(folder, name, target, place, components, DEPTH).write(out)
            exports[name] = str(out)
            if name != "transformers":
                exports[f"{name}-{WRONG}"] = str(mistaken(out, HEADS[head].mistake))
        case["heads"][head] = {
            "method": HEADS[head].method,
            "mistake": HEADS[head].mistake.__name__.replace("_", " "),
            "draft_tokens": DEPTH,
            "rounds": sum(len(each.rounds) for each in found),
            "accepted": sum(r.accepted for each in found for r in each.rounds),
            "drafts": drafts,
            "exports": exports,
            "drafter": str(folder),
            "taps": list(drafter.taps),
        }
        print(f"{head}: {case['heads'][head]['rounds']} rounds", flush=True)
    with torch.no_grad():
        if "eagle3" in folders:
            drafter = load_drafter(folders["eagle3"], target, components)
            rows = [
                first_drafts(target, drafter, [*p, *t]) for p, t in zip(prompts, plain, strict=True)
            ]
            case["heads"]["eagle3"]["first"] = rows
    return case


def kept(drafts: list[list[int]]) -> Any:
    """Return what keeps the draft tokens of every round."""

    def keep(added: Any, accepted: int, tree: Any, acceptance: Any) -> None:
        if tree is not None:
            drafts.append(tree.tokens[1:].tolist())

    return keep


def reserve_a_token(target: Any, texts: list[list[int]]) -> None:
    """Give a tokenizer without a padding token of its own one, as DFlash's mask needs it.

    It is one that none of the texts has.
    """
    tokenizer = target.tokenizer
    if tokenizer.pad_token_id in (None, *target.eos_ids):
        used = {*target.eos_ids, *(token for text in texts for token in text)}
        free = next(i for i in reversed(range(target.vocab_size)) if i not in used)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free)


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


def mistaken(folder: Path, mistake: Mistake) -> Path:
    """Return a copy of an export with a mistake in it."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    mistake(config, weights)
    wrong = folder.with_name(f"{folder.name}-{WRONG}")
    shutil.rmtree(wrong, ignore_errors=True)
    shutil.copytree(folder, wrong)
    (wrong / "config.json").write_text(json.dumps(config), "utf-8")
    whole = {name: each.contiguous() for name, each in weights.items()}
    save_file(whole, wrong / "model.safetensors", metadata={"format": "pt"})
    return wrong


def main() -> None:
    """Write ``case.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("heads", nargs="*", default=list(HEADS))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--set", action="append", default=[], help="of the experiment")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    folders = {}
    for word in given.heads:
        head, _, folder = word.partition("=")
        folders[head] = Path(folder).resolve() if folder else trained(head, work)
    settings = [f"evaluation.prompts.limit={given.prompts}", *given.set]
    case = prepared(folders, work, settings, given.new)
    (work / "case.json").write_text(json.dumps(case), "utf-8")


if __name__ == "__main__":
    main()
