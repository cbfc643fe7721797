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


def apart(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Return the largest error of a state as a share of its length, and of a number.

    With it comes the number that has this error, and how far apart float32's are there.
    """
    import torch

    shares = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)
    wrong = (theirs - ours).abs()
    number = ours.flatten()[wrong.argmax()].abs().float()
    step = torch.nextafter(number, torch.tensor(torch.inf)) - number
    return {
        "share": float(shares.max()),
        "absolute": float(wrong.max()),
        "of": float(number),
        "step": float(step),
    }


def in_float64(target: Any) -> Any:
    """Return a Llama in float64, with its norms and angles, which transformers has in float32."""
    import torch

    model = target.model.double()
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    powers = -torch.arange(0, size, 2, dtype=torch.float64) / size
    rates = config.rope_parameters["rope_theta"] ** powers

    def turned(states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * rates
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def normed(norm: Any) -> Any:
        def forward(states: Tensor) -> Tensor:
            squares = states.pow(2).mean(-1, keepdim=True)
            found: Tensor = norm.weight * states * (squares + norm.variance_epsilon).rsqrt()
            return found

        return forward

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = normed(module)
        elif type(module).__name__ == "LlamaRotaryEmbedding":
            module.forward = turned
    return target


def errors(
    experiment: Any, folder: Path, layers: list[int], texts: list[list[int]], *, exactly: bool
) -> Any:
    """Return per layer how far the states of files are from ``Target.tapped``.

    Args:
        experiment: says which target.
        folder: of the files.
        layers: of the states.
        texts: of the files.
        exactly: whether to say how far both are from the same pass in float64.
    """
    import torch

    from falcon_lab.data.state_files import read_states
    from falcon_lab.pretraining.target import ensure_target

    target = ensure_target(experiment.target, print)
    passes = {"ours": target}
    if exactly:
        passes["float64"] = in_float64(ensure_target(experiment.target, print))
    names = [f"layer {each}" for each in layers[:-1]] + [f"features, from layer {layers[-1]}"]
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    for text in texts:
        tokens = torch.tensor([text])
        given = tokens, torch.zeros_like(tokens), torch.arange(len(text))[None]
        theirs = read_states(folder, text, layers, target.hidden_size)
        assert theirs.shape == (len(text), len(layers), target.hidden_size)
        states = {"vllm": [*theirs[:, :-1].unbind(1), target.norm(theirs[:, -1])]}
        for name, model in passes.items():
            features, tapped = model.tapped(layers[:-1]).tapped_teacher(*given)
            states[name] = [*tapped[0].unbind(1), features[0]]
        pairs = [("ours", "vllm")]
        if exactly:
            pairs += [("float64", "ours"), ("float64", "vllm")]
        for one, other in pairs:
            for name, a, b in zip(names, states[one], states[other], strict=True):
                row = found[name].setdefault(f"{other} from {one}", {"share": 0.0, "absolute": 0.0})
                now = apart(a.double(), b.double())
                row["share"] = max(row["share"], now.pop("share"))
                if now["absolute"] >= row["absolute"]:
                    row.update(now)
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
        "errors": errors(on_line, states, wanted.layers, texts, exactly=True),
        "errors_off_by_one": errors(on_line, wrong, wanted.layers, texts, exactly=False),
        "off_by_one": refusal(training("wrong", wrong)).replace(str(work), "WORK"),
        "steps": len(pairs),
        "last_losses": pairs[-1:],
        "losses_apart": difference,
    }
    checks = {
        "the training asks for all texts": f"{len(texts)} of {len(texts)}" in asked,
        "every text has a file": found["files"] == len(texts),
        "states are the target's": all(
            each["share"] < LIMIT for row in found["errors"].values() for each in row.values()
        ),
        "layers off by one are refused": "nearer to those of layer" in found["off_by_one"],
        "both trainings end": refused == ["", ""],
        "losses are those on line": difference < CURVE,
    }
    return found | {"failed": [each for each, holds in checks.items() if not holds]}


if __name__ == "__main__":
    result = found_in(sys.argv[4], sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[5:])
    Path(sys.argv[3]).write_text(json.dumps(result, indent=2), "utf-8")
