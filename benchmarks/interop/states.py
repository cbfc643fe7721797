"""Hold hidden states that vLLM writes against the target's own, and a training from each.

    python benchmarks/interop/states.py TARGET WORK OUT.json PYTHON [KEY=VALUE]…

A training asks for the states of its texts, vLLM writes them in its environment
(``states_in_vllm.py``), and the same command trains from them. The negative control are the layers
below, called by the right names. What does not hold stands under ``failed``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare import EAGLE3, TRAINING

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIZES = (
    "data.documents=24",
    "data.length=128",
    "data.validation=2",
    "trainer.max_steps=10",
    "trainer.log_every_n_steps=1",
)
LIMIT = 1e-4
"""Error in float32, as a share of a state's length, that the order of additions explains."""
CURVE = 1e-3
"""Difference of losses, as their share, after a few steps from states with such errors."""


def experiment_of(name: str, out: Path, *words: str) -> Any:
    """Return a short training of EAGLE-3 on a target."""
    from falcon_lab.config.load import load_experiment

    common = [*TRAINING, *EAGLE3, *SIZES, f"target.name={name}", "target.dtype=float32"]
    return load_experiment(None, [*common, f"out={out}", f"name={out.name}", *words])


def refusal(experiment: Any) -> str:
    """Return what a run is refused with; nothing where it is not."""
    from falcon_lab.errors import FalconLabError
    from falcon_lab.experiment import run

    try:
        run(experiment, announce=print)
    except FalconLabError as error:
        return str(error)
    return ""


def losses(out: Path) -> list[float]:
    """Return the loss of every step of a run."""
    lines = map(json.loads, (out / "history.jsonl").read_text("utf-8").splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def apart(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest error of a state as a share of its length, and of a number."""
    shares = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)
    return float(shares.max()), float((theirs - ours).abs().max())


def errors(experiment: Any, folder: Path, layers: list[int], texts: list[list[int]]) -> Any:
    """Return per layer how far the states of files are from ``Target.tapped``."""
    import torch

    from falcon_lab.data.state_files import read_states
    from falcon_lab.pretraining.target import ensure_target

    target = ensure_target(experiment.target, print)
    *taps, last = layers
    tapped = target.tapped(taps)
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        tokens = torch.tensor([text])
        places = torch.arange(len(text))[None]
        features, states = tapped.tapped_teacher(tokens, torch.zeros_like(tokens), places)
        theirs = read_states(folder, text, layers, target.hidden_size)
        assert theirs.shape == (len(text), len(taps) + 1, target.hidden_size)
        pairs = [(f"layer {each}", states[0, :, i], theirs[:, i]) for i, each in enumerate(taps)]
        pairs.append((f"features, from layer {last}", features[0], target.norm(theirs[:, -1])))
        for name, ours, other in pairs:
            row = found.setdefault(name, {"share": 0.0, "absolute": 0.0})
            share, absolute = apart(ours, other)
            row["share"], row["absolute"] = max(row["share"], share), max(row["absolute"], absolute)
    return found


def extract(python: str, *words: str) -> None:
    """Have vLLM write the files of a folder."""
    paths = [ROOT / "src", ROOT / "plugins" / "falcon-lab-serving" / "src"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    script = str(HERE / "states_in_vllm.py")
    subprocess.run([python, script, *words], check=True, env=environment)


def found_in(python: str, name: str, work: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return what vLLM's files hold, and what does not hold.

    Args:
        python: interpreter of vLLM's environment.
        name: of the target.
        work: folder; what is in it is made anew.
        settings: of the training.
    """
    from falcon_lab.data.state_files import asked_for

    shutil.rmtree(work, ignore_errors=True)
    states, wrong = work / "states", work / "wrong"

    def training(out: str, files: Path) -> Any:
        store = f"data.feature_store={work / f'{out}-store'}"
        words = [*settings, store, f"data.extracted_states={files}"]
        return experiment_of(name, work / out, *words)

    asked = refusal(training("stored", states))
    wanted, texts = asked_for(states)
    shutil.copytree(states, wrong)
    extract(python, str(states), str(work / "seen.json"))
    extract(python, str(wrong), str(work / "wrong.json"), "off-by-one")
    on_line = experiment_of(name, work / "on-line", *settings)
    refused = [refusal(training("stored", states)), refusal(on_line)]
    pairs = list(zip(losses(work / "stored"), losses(work / "on-line"), strict=True))
    difference = max((abs(a - b) / b for a, b in pairs), default=1.0)
    found: dict[str, Any] = {
        **json.loads((work / "seen.json").read_text("utf-8")),
        "target": name,
        "layers": wanted.layers,
        "texts": len(texts),
        "files": len(list(states.glob("*.safetensors"))),
        "tokens": sum(map(len, texts)),
        "errors": errors(on_line, states, wanted.layers, texts),
        "errors_off_by_one": errors(on_line, wrong, wanted.layers, texts),
        "off_by_one": refusal(training("wrong", wrong)).replace(str(work), "WORK"),
        "steps": len(pairs),
        "last_losses": pairs[-1:],
        "losses_apart": difference,
    }
    checks = {
        "the training asks for all texts": f"{len(texts)} of {len(texts)}" in asked,
        "every text has a file": found["files"] == len(texts),
        "states are the target's": all(e["share"] < LIMIT for e in found["errors"].values()),
        "layers off by one are refused": "nearer to those of layer" in found["off_by_one"],
        "both trainings end": refused == ["", ""],
        "losses are those on line": difference < CURVE,
    }
    return found | {"failed": [each for each, holds in checks.items() if not holds]}


if __name__ == "__main__":
    result = found_in(sys.argv[4], sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[5:])
    Path(sys.argv[3]).write_text(json.dumps(result, indent=2), "utf-8")
