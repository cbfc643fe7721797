"""The two trainings of ``gpu_real.py``: a target from scratch, and its drafter.

Each leaves its product in a folder, and is not done again where that is there.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule

from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import Experiment, Gate, ModelShape, PretrainingConfig
from falcon_lab.data.corpora import read_text
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.distill.stage import train_drafter, training_of
from falcon_lab.errors import FalconLabError
from falcon_lab.files import write_atomically
from falcon_lab.model.loading import resolve_device
from falcon_lab.plugins.discovery import load_components
from falcon_lab.pretraining.target import ensure_target
from falcon_lab.pretraining.training import Pretraining, build_model, data_of, trained_tokenizer
from falcon_lab.run import Run
from falcon_lab.timing import Stopwatch
from falcon_lab.training import train

Announce = Callable[[str], None]

CORPUS, TARGET, DRAFTER, LOSS = "sources.jsonl", "target", "run", "loss.json"
NEVER = 10**9
"""Steps between checkpoints: a training of minutes needs none."""

CALIBRATION = 10
"""Steps that tell how many more fit into the time."""


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        minutes: of each of the two trainings.
        megabytes: of sources, at the most.
        vocabulary: of the byte-level BPE.
        model: the target's shape.
        length: tokens of a packed sequence.
        batch_size: sequences of a step.
        lr: of the target.
        precision: of both trainings, as Lightning's ``precision``.
        dtype: that is decoded in.
        block: k of the drafter.
        steps: of both trainings, in place of the time.
        prompts: a JSONL file in the MT-bench format; where there is none, beginnings of sources
            that were held out.
        limit: prompts at the most; each is answered once before it is timed, which captures every
            graph that it needs.
        new_tokens: of an answer.
        temperatures: to measure at.
        trees: as ``falcon-lab bench --tree``.
        compile: as ``decoding.compile``.
        lookup: whether Hugging Face's prompt lookup is measured too.
    """

    minutes: float = 5.0
    megabytes: float = 100
    vocabulary: int = 16_384
    model: ModelShape = field(
        default_factory=lambda: ModelShape(
            layers=24, hidden=1024, intermediate=2816, heads=16, max_positions=4096
        )
    )
    length: int = 1024
    batch_size: int = 16
    lr: float = 6e-4
    precision: str = "bf16-mixed"
    dtype: str = "bfloat16"
    block: int = 2
    steps: int | None = None
    prompts: str = "shared/prompts/humaneval.jsonl"
    limit: int = 12
    new_tokens: int = 160
    temperatures: Sequence[float] = (0.0, 1.0)
    trees: Sequence[str] = ("chain,depth=6", "static,template=k2-16", "static,template=llama")
    compile: str = "all"
    lookup: bool = False


TOY = Plan(
    megabytes=0.1,
    vocabulary=300,
    model=ModelShape(layers=2, hidden=32, intermediate=64, heads=2, max_positions=512),
    length=64,
    batch_size=2,
    precision="32-true",
    dtype="float32",
    steps=3,
    limit=2,
    new_tokens=8,
    trees=("chain,depth=4",),
    compile="none",
)
"""The same in a few seconds on a CPU."""


# --- the target ---------------------------------------------------------------------------------


def make_target(plan: Plan, folder: Path, announce: Announce) -> None:
    """Gather sources, and train the tokenizer and the target, unless they are there."""
    place = folder / TARGET
    if (place / LOSS).exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    gather_sources(folder / CORPUS, plan.megabytes, announce)
    recipe = recipe_of(plan, folder)
    tokenizer = trained_tokenizer(recipe, place)
    data = data_of(recipe, tokenizer)
    announce(f"target: {len(data.train_sequences)} sequences of {plan.length} tokens")
    steps = plan.steps or steps_within(
        plan, lambda: Pretraining(build_model(recipe.model, tokenizer, seed=0), recipe), data, place
    )
    recipe.steps, recipe.warmup_steps = steps, max(1, min(200, steps // 20))
    announce(f"target: {steps} steps")
    model = build_model(recipe.model, tokenizer, seed=recipe.seed)
    arguments = trainer_of(plan, steps)
    with Stopwatch() as watch:
        trainer = train(
            Pretraining(model, recipe), data, arguments, folder / "pretrain", checkpoint_every=NEVER
        )
    loss = held_out(model, recipe, data)
    model.to(getattr(torch, plan.dtype)).save_pretrained(place)
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": int(trainer.global_step),
        "tokens": int(trainer.global_step) * plan.batch_size * plan.length,
        "seconds": watch.wall,
        "nats_per_token": loss,
    }
    write_atomically(place / LOSS, json.dumps(found, indent=1))
    announce(f"target: {loss:.2f} nats a token, {watch.wall:.0f} s")


@torch.no_grad()
def held_out(model: Any, recipe: PretrainingConfig, data: FalconDataModule) -> float:
    """Nats a token of the validation sequences, on the GPU where there is one."""
    device = resolve_device("auto")
    module = Pretraining(model.eval().to(device), recipe)
    total, count = 0.0, 0
    for batch in data.val_dataloader():
        loss, tokens = module.loss_of(move_data_to_device(batch, device))
        total, count = total + float(loss), count + tokens
    return total / max(1, count)


def gather_sources(path: Path, megabytes: float, announce: Announce) -> None:
    """Write the Python sources that this Python finds into one JSONL, unless it is there."""
    if path.exists():
        return
    left, lines = megabytes * 1_000_000, []
    for file in python_sources():
        text = read_text(file)
        if text is not None and len(text) <= 400_000:  # tables that are longer are no code
            lines.append(json.dumps({"text": text}))
            left -= len(text)
        if left <= 0:
            break
    if len(lines) < 3:
        raise FalconLabError("this machine has no Python sources to train on")
    announce(f"{len(lines)} files, {megabytes - left / 1e6:.3g} MB of Python sources")
    write_atomically(path, "\n".join(lines) + "\n")


def python_sources() -> Iterator[Path]:
    """The standard library first, then whatever is installed."""
    paths = sysconfig.get_paths()
    seen: set[Path] = set()
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"], paths["platlib"], *sys.path)):
        if not root or not Path(root).is_dir():
            continue
        for file in sorted(Path(root).rglob("*.py")):
            if file not in seen and "__pycache__" not in file.parts:
                seen.add(file)
                yield file


def recipe_of(plan: Plan, folder: Path) -> PretrainingConfig:
    """Return the plan as the target's recipe."""
    return PretrainingConfig(
        corpus=str(folder / CORPUS),
        documents=10**9,
        vocabulary=plan.vocabulary,
        model=plan.model,
        length=plan.length,
        batch_size=plan.batch_size,
        lr=plan.lr,
        gate=Gate(parse=0.0, distinct=0.0),
    )


class Stamps(Callback):
    """Notes the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._watch = Stopwatch(resolve_device("auto"))

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Note a step that has ended."""
        self.seconds.append(self._watch.lap())


def steps_within(
    plan: Plan, module: Callable[[], LightningModule], data: FalconDataModule, folder: Path
) -> int:
    """How many steps fit into the plan's minutes, by a few of them.

    Args:
        plan: says how long.
        module: makes what is trained, to be thrown away again.
        data: batches.
        folder: where Lightning may write.
    """
    stamps, where = Stamps(), folder / "calibration"
    arguments = trainer_of(plan, CALIBRATION)
    train(module(), data, arguments, where, checkpoint_every=NEVER, callbacks=[stamps])
    settled = stamps.seconds[CALIBRATION // 2 :]  # the first ones set things up
    return max(1, int(60 * plan.minutes * len(settled) / sum(settled)))


def trainer_of(plan: Plan, steps: int) -> dict[str, Any]:
    """Return Lightning's arguments: one device, nothing but training."""
    return {
        "max_steps": steps,
        "precision": plan.precision,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 0,
        "devices": 1,
        "enable_progress_bar": False,
    }


# --- the drafter --------------------------------------------------------------------------------


def train_plan(plan: Plan, folder: Path, announce: Announce) -> None:
    """Train Falcon's drafter by CSGD, unless it is there."""
    done = folder / "drafter.json"
    if done.exists():
        return
    first = drafter_experiment(plan, folder, CALIBRATION)
    target = ensure_target(first.target, announce)
    data = FalconDataModule.for_target(first.data, target)
    announce(f"drafter: {len(data.train_sequences)} sequences of {plan.length} tokens")
    components = load_components()
    steps = plan.steps or steps_within(
        plan, lambda: training_of(first, target, components)[0], data, folder
    )
    announce(f"drafter: {steps} steps")
    watch = Stopwatch()
    with Run.open(drafter_experiment(plan, folder, steps), announce=announce) as current:
        if not current.training_done:
            train_drafter(
                current.experiment,
                target,
                data,
                current.components,
                folder=current.folder,
                save_to=current.drafter_folder,
                loggers=current.tracking.loggers,
            )
    found = {"steps": steps, "seconds": watch.lap(), "block": plan.block}
    write_atomically(done, json.dumps(found, indent=1))


def drafter_experiment(plan: Plan, folder: Path, steps: int) -> Experiment:
    """The experiment that trains the drafter, and no more."""
    settings = {
        "name": "gpu-real",
        "out": str(folder / DRAFTER),
        "stages": ["target", "data", "distil"],
        "target.name": str(folder / TARGET),
        "target.dtype": plan.dtype,
        "data.corpus": str(folder / CORPUS),
        "data.documents": 10**9,
        "data.length": plan.length,
        "data.batch_size": plan.batch_size,
        "data.validation": 8,
        "drafter.name": "falcon",
        "drafter.block": plan.block,
        "drafter.dropout": 0.0,
        "glancing.name": "csgd",
        "objective.name": "falcon",
        "objective.soft": 1.0,
        "objective.hard": 0.1,
        "distillation.optimizer.lr": 5e-4,
        "distillation.optimizer.warmup_steps": max(1, min(100, steps // 20)),
        "distillation.checkpoint_every": max(1, steps // 2),
        "wandb.mode": "disabled",
        "trainer.max_steps": steps,
        "trainer.precision": plan.precision,
        "trainer.gradient_clip_val": 0.5,
        "trainer.devices": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": False,
    }
    return load_experiment(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
