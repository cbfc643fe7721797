"""Measure training against the same step written straightforwardly: speed, and peak memory.

For speed, all loops train on the same batches in turns, in one process, and start from the same
weights. Ours runs under Lightning as it always does; a callback runs the others between its steps.
Speed is also given as a share of the multiplications and additions that a step cannot do without.

Every measurement of memory is a process of its own, so that its peak is too:
``python -m falcon_bench.distillation_cost '{"vocabulary": 131072, …}'``.

Shapes: B sequences, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from falcon_bench.straightforward import CLIP, Manner, StraightforwardLoop
from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import DistillationConfig, Experiment
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.packing import Batch
from falcon_lab.distill.module import Distillation
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.relaxed_mask import find_documents
from falcon_lab.errors import FalconLabError
from falcon_lab.glancing import Csgd
from falcon_lab.interfaces import BuildContext
from falcon_lab.measure import provenance
from falcon_lab.model.target import Target
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import CsgdConfig, FalconConfig, FalconObjectiveConfig
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.target import ensure_target
from falcon_lab.report.tables import Column, Table, decimals, percent
from falcon_lab.studies.bench.machine import Machine, measure_machine
from falcon_lab.studies.bench.memory import peak_of
from falcon_lab.timing import Stopwatch
from falcon_lab.training import train


@dataclass(frozen=True)
class StepCost:
    """Operations of one micro-batch by part; a multiplication and an addition are two.

    Counted from shapes, for tokens that are no padding: matrix products with every weight, and
    attention to the keys of a query. A backward pass counts twice its forward pass, through
    the head once, whose weights are frozen. The teacher reads each token once, however often the
    student studies it.

    Attributes:
        teacher: its pass.
        glance: the student's first pass.
        student: its second one, forward and backward.
        heads: the LM head: once a token for the teacher; forward in both of the student's passes,
            and backward.
    """

    teacher: float
    glance: float
    student: float
    heads: float

    @classmethod
    def of(cls, module: Distillation, batch: Batch, *, glances: bool) -> Self:
        """Count those of a module's training step on ``batch``."""
        target, drafter, times = module.target, module.drafter, module.config.repeats
        tokens = int((batch.documents >= 0).sum())
        teacher = _pass(target.backbone, target.config, tokens, batch)
        student = times * _pass(drafter, drafter.backbone.config, tokens, batch)
        head = 2.0 * target.hidden_size * target.vocab_size * tokens
        return cls(
            teacher=teacher,
            glance=student if glances else 0.0,
            student=3 * student,
            heads=head * (1 + times * (3 if glances else 2)),
        )

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return self.teacher + self.glance + self.student + self.heads


def _pass(network: nn.Module, config: Any, tokens: int, batch: Batch) -> float:
    tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(p): p for p in network.parameters() if p.dim() > 1 and id(p) not in tables}
    weights = sum(p.numel() for p in matrices.values())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = size * config.num_attention_heads
    return 2.0 * weights * tokens + 4.0 * width * config.num_hidden_layers * _seen(batch)


def _seen(batch: Batch) -> int:
    """Pairs of a token and one of its document that is not later."""
    runs = find_documents(batch.documents)
    return int((runs.offset[batch.documents >= 0] + 1).sum(dtype=torch.long))


WARM_UP_TOKENS = 16
"""Tokens of a first pass, which makes the weights' gradients and whatever is kept for good."""

GLANCING = 0.4
"""λ at the start of a training."""


@dataclass(frozen=True)
class Shape:
    """What is measured: a Llama-like target of random weights with one layer, float32.

    Attributes:
        whole: the straightforward way, with logits of all rows, or ours.
        vocabulary: V.
        hidden: H.
        sequences: B.
        length: T; documents are a quarter of it.
        logits_mib: of ours.
        fuse: of the drafter, which has one decoder block.
    """

    whole: bool
    vocabulary: int
    hidden: int
    sequences: int
    length: int
    logits_mib: int = 256
    fuse: str = "linear"


def measure_apart(shape: Shape, *, threads: int) -> dict[str, Any]:
    """``measure`` in a process of its own, with ``error`` where that one died (of memory, mostly).

    Raises:
        FalconLabError: the system does not tell a process's peak.
    """
    command = [sys.executable, "-m", __name__, json.dumps(asdict(shape) | {"threads": threads})]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # benchmarks/ too
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return {"shape": asdict(shape), "error": last[0]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(shape: Shape) -> dict[str, Any]:
    """Measure bytes and seconds of one forward and backward pass, after a small one."""
    module = _module(shape)
    loop = StraightforwardLoop(module, Manner(teach_each=True)) if shape.whole else None

    def run(batch: Batch) -> float:
        if loop is None:
            whole, tally = module.step(batch).train(GLANCING)
            rows = tally.reduced()["train/loss"][1]
            loss = whole / rows
        else:
            loss = loop.loss(batch)
        loss.backward()
        return float(loss.detach())

    run(_batch(shape, 1, WARM_UP_TOKENS))
    batch = _batch(shape, shape.sequences, shape.length)
    losses: list[float] = []
    with Stopwatch() as watch:
        peak = peak_of(lambda: losses.append(run(batch)), torch.device("cpu"))
    if peak is None:
        raise FalconLabError("this system does not tell how much memory a process had at its peak")
    return {"shape": asdict(shape), **asdict(peak), "seconds": watch.wall, "loss": losses[0]}


def _module(shape: Shape) -> Distillation:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=1,
        num_attention_heads=max(1, shape.hidden // 128),
        max_position_embeddings=max(shape.length, WARM_UP_TOKENS),
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    target = Target(_filled(model), _NoTokenizer(), name="random")
    context = BuildContext(target, block=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = FalconDrafter(FalconConfig(block=2, fuse=shape.fuse, dropout=0.0), context)
    return Distillation(
        target,
        drafter.train(),
        FalconObjective(FalconObjectiveConfig(), context),
        Csgd(CsgdConfig(start=GLANCING), context),
        DistillationConfig(logits_mib=shape.logits_mib),
        seed=0,
        max_steps=1,
    )


def _filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.uniform_(-0.03, 0.03, generator=generator)
    return model


class _NoTokenizer:
    """Stands where a tokenizer is not needed."""

    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def _batch(shape: Shape, sequences: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (sequences, length), generator=generator)
    quarter = max(1, length // 4)
    column = torch.arange(length).expand(sequences, -1)
    documents = column.div(quarter, rounding_mode="floor")
    every = torch.ones(sequences, length, dtype=torch.bool)
    return Batch(tokens, every, documents, column % quarter, torch.tensor(0))


def main(text: str) -> None:
    """Measure what the JSON in ``text`` says and write the result to standard output."""
    given = json.loads(text)
    torch.set_num_threads(given.pop("threads"))
    sys.stdout.write(json.dumps(measure(Shape(**given))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])


MIB = 2**20
SPEED = (
    Column("loop", "name"),
    Column("ms a step", "seconds_per_step", decimals(0, scale=1000)),
    Column("CPU ms", "cpu_seconds_per_step", decimals(0, scale=1000)),
    Column("tok/s trained on", "tokens_per_second", decimals(0)),
    Column("ours is", "ours_is_faster", decimals(2, unit="×")),
    Column("utilisation %", "utilisation", percent(1)),
    Column("loss differs by", "loss_difference", "{:.1e}".format),
)
MEMORY = (
    Column("way", lambda m: "whole" if m["shape"]["whole"] else f"{m['shape']['logits_mib']} MiB"),
    Column("V", lambda m: m["shape"]["vocabulary"]),
    Column("H", lambda m: m["shape"]["hidden"]),
    Column("B x T", lambda m: m["shape"]["sequences"] * m["shape"]["length"]),
    Column("growth MiB", lambda m: m.get("growth"), decimals(0, scale=1 / MIB)),
    Column("s", lambda m: m.get("seconds"), decimals(1)),
    Column("loss", lambda m: m["error"] if "error" in m else f"{m['loss']:.6f}", left=True),
)


def format_speed(results: Mapping[str, Any]) -> str:
    """Write the table of ``bench_distillation``'s results."""
    whole = sum(results["parts"].values())
    parts = ", ".join(f"{n} {100 * s / whole:.1f} %" for n, s in results["parts"].items())
    machine = results["machine"]
    notes = [
        f"{results['steps']} steps. Ours: {parts}.",
        f"{results['cost']['total'] / 1e9:.1f} GFLOP a step at the least; "
        f"{machine['operations_per_second'] / 1e9:.0f} GFLOP/s in a matrix product, "
        f"{results['hardware']['threads']} threads.",
    ]
    loops = [{"name": name, **loop} for name, loop in results["loops"].items()]
    return Table(SPEED, loops, notes).text()


def format_memory(found: Sequence[Mapping[str, Any]]) -> str:
    """Write the table of what ``measure_apart`` found."""
    return Table(MEMORY, found).text()


OURS = "ours"
LADDER = {
    "straightforward, one document a sequence": Manner(alone=True, teach_each=True),
    "straightforward": Manner(padded=True, teach_each=True),
    "+ documents in streams": Manner(teach_each=True),
    "+ one teacher pass for all phases": Manner(),
}
"""From the straightforward way to ours, one difference a row. What is left between the last of them
and ours: logits of the rows that count alone, once, a part at a time, with one softmax for both
terms; the noise drawn and the labels found once; accuracy in logged steps alone."""

WARM_UP = 3
"""First steps that do not count."""


class InTurns(Callback):
    """Between two steps of ours, every other loop takes one with the same batch.

    Attributes:
        seconds: loop -> of each step; ours with its data and its logging.
        cpu: the processor's time for the same, all threads together, which a busy machine disturbs
            less.
        losses: loop -> of each step.
        parts: of ours, part of a step -> of each step.
        batches: that were taken.
    """

    def __init__(self, loops: dict[str, StraightforwardLoop]) -> None:
        self.loops = loops
        self.seconds: dict[str, list[float]] = {name: [] for name in (*loops, OURS)}
        self.cpu: dict[str, list[float]] = {name: [] for name in (*loops, OURS)}
        self.losses: dict[str, list[float]] = {name: [] for name in (*loops, OURS)}
        self.parts: dict[str, list[float]] = {}
        self.batches: list[Batch] = []
        self._watch = Stopwatch()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Our clock starts."""
        self._watch.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop our clock, let the others have their turn, and start it again."""
        assert isinstance(pl_module, Distillation)
        self._note(OURS, float(outputs["loss"]))
        self.batches.append(batch)
        for part, taken in pl_module.clock.seconds.items():
            self.parts.setdefault(part, []).append(taken)
        for name, loop in self.loops.items():
            self._watch.start()
            self._note(name, loop.step(batch))
        self._watch.start()

    def _note(self, name: str, loss: float) -> None:
        self._watch.lap()
        self.seconds[name].append(self._watch.wall)
        self.cpu[name].append(self._watch.cpu)
        self.losses[name].append(loss)


def bench_distillation(
    experiment: Experiment, *, steps: int, announce: Callable[[str], None]
) -> dict[str, Any]:
    """Measure speed and loss curve of ours and of every rung of ``LADDER``.

    Args:
        experiment: target, data, drafter, glancing, objective, distillation, trainer.
        steps: that count.
        announce: is called with one line for the user at a time.

    Returns:
        ``loops`` (by name: median seconds of a step, wall and CPU; tokens studied in a second; how
        many times as fast ours is; model FLOPs utilisation; losses, and their greatest relative
        difference from ours), ``parts`` (median seconds of ours), ``cost``, ``machine`` and where
        they come from.

    Raises:
        FalconLabError: the drafter or the objective is not Falcon's, or it has dropout.
    """
    target = ensure_target(experiment.target, announce)
    data = FalconDataModule.for_target(experiment.data, target)
    header = provenance.header(target, folder=Path(__file__).parent)
    announce("measuring what this machine multiplies")
    machines = [measure_machine(target.device, target.dtype, 0)]
    module = module_of(experiment, target, load_components(), steps)
    turns = run_in_turns(module, data, steps, announce)
    machines.append(measure_machine(target.device, target.dtype, 0))
    machine = max(machines, key=lambda each: each.operations_per_second)  # the less disturbed one
    return {
        "schema": 1,
        "name": "distillation",
        **header,
        "experiment": to_plain(experiment),
        "machine": asdict(machine),
        **summarise(module, turns, machine),
    }


def module_of(
    experiment: Experiment, target: Target, components: Components, steps: int
) -> Distillation:
    """Return the experiment's training module, with fresh weights."""
    names = {kind: getattr(experiment, kind)["name"] for kind in ("drafter", "objective")}
    if set(names.values()) != {"falcon"} or experiment.drafter.get("dropout"):
        raise FalconLabError(
            f"this benchmark compares trainings of the falcon drafter by the falcon objective "
            f"without dropout, not of {names}; set drafter.name, objective.name and drafter.dropout"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        drafter = components.build("drafter", experiment.drafter, BuildContext(host=target))
    context = BuildContext.of(target, drafter)
    return Distillation(
        target,
        drafter.train(),
        components.build("objective", experiment.objective, context),
        components.build("schedule", experiment.glancing, context),
        experiment.distillation,
        seed=experiment.seed,
        max_steps=WARM_UP + steps,
    )


def run_in_turns(
    module: Distillation,
    data: FalconDataModule,
    steps: int,
    announce: Callable[[str], None],
) -> InTurns:
    """Train ours, with the others between its steps."""
    turns = InTurns({name: StraightforwardLoop(module, manner) for name, manner in LADDER.items()})
    announce(f"{WARM_UP + steps} steps of {len(LADDER) + 1} loops in turns")
    quiet = {"enable_progress_bar": False, "accelerator": module.target.device.type}
    trainer = {**quiet, "max_steps": WARM_UP + steps, "gradient_clip_val": CLIP}
    with TemporaryDirectory() as folder:
        train(module, data, trainer, Path(folder), None, 0, [turns])
    return turns


def summarise(module: Distillation, turns: InTurns, machine: Machine) -> dict[str, Any]:
    """What was measured, without the first steps."""
    ratio = module.schedule.ratio(0.0)
    costs = [StepCost.of(module, batch, glances=ratio > 0) for batch in turns.batches[WARM_UP:]]
    operations = sum(cost.total for cost in costs)
    studied = module.config.repeats * sum(
        int((batch.documents >= 0).sum()) for batch in turns.batches[WARM_UP:]
    )
    total = {name: sum(taken[WARM_UP:]) for name, taken in turns.seconds.items()}
    ours = turns.losses[OURS]
    loops = {
        name: {
            "seconds_per_step": median(turns.seconds[name][WARM_UP:]),
            "cpu_seconds_per_step": median(turns.cpu[name][WARM_UP:]),
            "tokens_per_second": studied / total[name],
            "ours_is_faster": total[name] / total[OURS],
            "utilisation": operations / total[name] / machine.operations_per_second,
            "losses": turns.losses[name],
            "loss_difference": max(
                abs(a - b) / b for a, b in zip(turns.losses[name], ours, strict=True)
            ),
        }
        for name in turns.seconds
    }
    mean = {key: sum(getattr(cost, key) for cost in costs) / len(costs) for key in COSTS}
    parts = {name: median(seconds[WARM_UP:]) for name, seconds in turns.parts.items()}
    return {"steps": len(costs), "loops": loops, "parts": parts, "cost": mean}


COSTS = ("teacher", "glance", "student", "heads", "total")
