"""Measure what each way of computing a training step is worth, on any target.

Every arm is the way before it and one change more. All train drafters of the same first weights on
the same batches, in turns, in one process; a step is the whole of it, from the batch to the
optimiser, without Lightning around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from falcon_bench.straightforward import CLIP
from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import Experiment
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.packing import Batch
from falcon_lab.distill.module import Distillation
from falcon_lab.distill.stage import training_of
from falcon_lab.measure import provenance
from falcon_lab.model.target import Target
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.target import ensure_target
from falcon_lab.report.tables import Column, Table, decimals
from falcon_lab.timing import Stopwatch, in_turns
from falcon_lab.training import make_optimizer

WARM_UP = 1
"""First steps of every arm that do not count."""

PARTS = ("teacher", "glance", "student", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Way:
    """How an arm computes a step.

    Attributes:
        name: of the arm.
        target: dtype of the target, and so of the LM head.
        mixed: whether the student computes in bfloat16, with float32 weights.
        stored: whether the teacher's features come from a feature store.
        words: tokens of a draft vocabulary; None: all of the target's.
    """

    name: str
    target: str = "float32"
    mixed: bool = False
    stored: bool = False
    words: int | None = None

    def of(self, experiment: Experiment, folder: Path) -> Experiment:
        """Return the experiment of this arm; features are stored in ``folder``."""
        store = str(folder / self.target) if self.stored else None
        return replace(
            experiment,
            target=replace(experiment.target, dtype=self.target),
            data=replace(experiment.data, feature_store=store),
            drafter={**experiment.drafter, "draft_vocabulary": self.words},
        )


SOME = 8192
"""Tokens of a draft vocabulary, where the target has more."""

WAYS = (
    Way("float32"),
    Way("+ features stored", stored=True),
    Way(f"+ draft vocabulary of {SOME:,}", stored=True, words=SOME),
    Way("+ student in bfloat16", stored=True, words=SOME, mixed=True),
    Way("+ target in bfloat16", stored=True, words=SOME, mixed=True, target="bfloat16"),
)


class Arm:
    """One way, with a drafter and an optimiser of its own.

    Attributes:
        seconds: of each step that counted.
        cpu: the processor's time for the same, all threads together.
        parts: part of a step -> seconds of each.
        losses: of every step.

    Args:
        way: what is done.
        experiment: that way's.
        target: in its dtype.
        data: batches, with features where they are stored.
        components: the registry.
    """

    def __init__(
        self,
        way: Way,
        experiment: Experiment,
        target: Target,
        data: FalconDataModule,
        components: Components,
    ) -> None:
        self.way, self.batches = way, data.batches()
        self.module: Distillation = training_of(experiment, target, components, data.token_counts)[
            0
        ]
        self.module.setup("fit")
        self.weights = [p for p in self.module.drafter.parameters() if p.requires_grad]
        made = make_optimizer(
            self.weights, experiment.distillation.optimizer, self.module.max_steps
        )
        self.optimizer, self.rate = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self.losses: list[float] = []

    def step(self, number: int, *, counts: bool) -> Batch:
        """Train on batch ``number``, and return it."""
        with Stopwatch() as watch:
            batch = self.batches[number]
            loss, clock = self._train(batch)
        self.losses.append(loss)
        if counts:
            self.seconds.append(watch.wall)
            self.cpu.append(watch.cpu)
            for part in PARTS:
                self.parts[part].append(clock.get(part, 0.0))
        return batch

    def _train(self, batch: Batch) -> tuple[float, dict[str, float]]:
        module, clock = self.module, self.module.clock
        clock.begin(batch.tokens.device, wanted=True)
        ratio = module.schedule.ratio(len(self.losses) / module.max_steps)
        with self._precision():
            summed, tally = module.step(batch).train(ratio)
        loss = summed / max(1.0, tally.reduced()["train/loss"][1])
        clock.lap("loss")
        loss.backward()
        clock.lap("backward")
        nn.utils.clip_grad_norm_(self.weights, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step()
        clock.lap("optimizer")
        return float(loss.detach()), clock.seconds

    def _precision(self) -> AbstractContextManager[object]:
        if not self.way.mixed:
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)


def bench_arms(
    experiment: Experiment,
    *,
    steps: int,
    announce: Callable[[str], None],
    ways: Sequence[Way] = WAYS,
) -> dict[str, Any]:
    """Measure the arms in turns.

    Args:
        experiment: target, data, drafter, glancing, objective, distillation.
        steps: that count.
        announce: is called with one line for the user at a time.
        ways: of the arms, each to be compared with the first and with the one before it.

    Returns:
        ``arms`` (by name: median seconds of a step and of its parts, tokens and tokens of the loss
        in a second, ratios, losses), and where they come from.
    """
    with TemporaryDirectory() as folder:
        arms = arms_of(experiment, ways, Path(folder), announce)
        header = provenance.header(arms[0].module.target, folder=Path(__file__).parent)
        announce(f"{WARM_UP + steps} steps of {len(arms)} arms in turns")
        batches = [
            arm.step(repeat + WARM_UP, counts=repeat >= 0)
            for repeat, arm in in_turns(arms, steps, warm_up=WARM_UP)
        ]
    counted = batches[WARM_UP * len(arms) :: len(arms)]
    tokens = sum(int((batch.documents >= 0).sum()) for batch in counted)
    answers = sum(int(batch.loss_mask.sum()) for batch in counted)
    return {
        "schema": 1,
        "name": "distillation-arms",
        **header,
        "experiment": to_plain(experiment),
        "steps": steps,
        "tokens": tokens,
        "answer_tokens": answers,
        "arms": summarise(arms, tokens, answers),
    }


def arms_of(
    experiment: Experiment, ways: Sequence[Way], folder: Path, announce: Callable[[str], None]
) -> list[Arm]:
    """Return the arms; those of one dtype share a target, and its feature store.

    A draft vocabulary is left out where the target's own is no larger.
    """
    components, targets, arms = load_components(), {}, []
    for way in ways:
        mine = way.of(experiment, folder)
        if way.target not in targets:
            targets[way.target] = ensure_target(mine.target, announce, components)
        target = targets[way.target]
        if way.words is not None and way.words >= target.vocab_size:
            mine = replace(way, words=None).of(experiment, folder)
        data = FalconDataModule.for_target(mine.data, target)
        data.build_features(target, announce)
        arms.append(Arm(way, mine, target, data, components))
    return arms


def summarise(arms: Sequence[Arm], tokens: int, answers: int) -> dict[str, Any]:
    """Return the figures of every arm."""
    first, before = arms[0], [arms[0], *arms[:-1]]
    return {
        arm.way.name: {
            "way": asdict(arm.way),
            "seconds_per_step": median(arm.seconds),
            "cpu_seconds_per_step": median(arm.cpu),
            "parts": {part: median(seconds) for part, seconds in arm.parts.items()},
            "tokens_per_second": tokens / sum(arm.seconds),
            "answer_tokens_per_second": answers / sum(arm.seconds),
            "times_the_first": _times_as_fast(arm, first),
            "times_the_one_before": _times_as_fast(arm, former),
            "losses": arm.losses,
            "loss_difference": max(
                abs(mine - theirs) / theirs
                for mine, theirs in zip(arm.losses, first.losses, strict=True)
            ),
        }
        for arm, former in zip(arms, before, strict=True)
    }


def _times_as_fast(arm: Arm, other: Arm) -> float:
    """Return the median over the steps, each against the same step of the other arm."""
    return median(b / a for a, b in zip(arm.seconds, other.seconds, strict=True))


COLUMNS = (
    Column("arm", "name"),
    Column("ms a step", "seconds_per_step", decimals(0, scale=1000)),
    Column("CPU ms", "cpu_seconds_per_step", decimals(0, scale=1000)),
    *(Column(part, part, decimals(0, scale=1000)) for part in PARTS),
    Column("tok/s", "tokens_per_second", decimals(0)),
    Column("answer tok/s", "answer_tokens_per_second", decimals(0)),
    Column("over the one before", "times_the_one_before", decimals(2, unit="×")),
    Column("over the first", "times_the_first", decimals(2, unit="×")),
    Column("loss differs by", "loss_difference", "{:.1e}".format),
)


def format_arms(results: Mapping[str, Any]) -> str:
    """Write the table of ``bench_arms``'s results."""
    arms = [{"name": name, **arm, **arm["parts"]} for name, arm in results["arms"].items()]
    note = (
        f"{results['steps']} steps of an arm, on {results['tokens']:,} tokens, "
        f"{results['answer_tokens']:,} of them in the loss; parts in ms; "
        f"{results['hardware']['threads']} threads."
    )
    return Table(COLUMNS, arms, [note]).text()
