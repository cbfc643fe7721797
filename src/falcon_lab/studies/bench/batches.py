"""Throughput against the number of sequences that are decoded side by side.

Shapes: B sequences at a time, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import PLAIN, Experiment
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.measure import provenance
from falcon_lab.measure.engines import Setup
from falcon_lab.plugins.discovery import load_components
from falcon_lab.pretraining.target import target_ahead
from falcon_lab.timing import Stopwatch, rotated, torch_threads

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.decoding.generation import Seconds


ALONE = 0
"""Stands for the engine that knows one sequence, where a batch size is needed."""

WARM = 4
"""New tokens of a warm-up."""


@dataclass
class Job:
    """One method at one size.

    Attributes:
        method: its name.
        size: B, or ``ALONE``.
        answer: lets it answer so many prompts, with so many new tokens at most.
        device: that works for it.
        seconds: wall time of every repeat.
        texts: of the last one.
    """

    method: str
    size: int
    answer: Callable[[int, int], list[Generation]]
    device: torch.device
    seconds: list[float] = field(default_factory=list)
    texts: list[Generation] = field(default_factory=list)


def bench_batches(
    experiment: Experiment,
    sizes: Sequence[int],
    *,
    announce: Callable[[str], None],
    clock: str = "wall",
) -> dict[str, Any]:
    """Let plain decoding and every method answer all prompts at every size, in turns.

    Args:
        experiment: target, prompts (their first turns), lengths, repeats, methods.
        sizes: of batches.
        announce: is called with one line for the user at a time.
        clock: ``wall``, or ``cpu``: the time that a core worked for this process, which a machine
            that does other things too does not stretch. For one thread without a GPU.

    Returns:
        ``date``, ``command``, ``versions``, ``hardware``, ``git``, ``target``, ``experiment``,
        ``prompts`` (how many), ``sizes``, ``clock``, ``left_out``, and ``methods``: each with its
        ``label``, ``lossless``, ``alone`` (the engine for one sequence) and ``batches``, a point
        for every size: ``size``, ``tokens``, median ``seconds`` and those of all ``repeats``,
        ``tokens_per_second``, ``tau``, ``identical`` (share of the texts that are plain
        decoding's alone) and ``split`` (share of the parts of the time, in %).

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    if clock not in ("wall", "cpu"):
        raise FalconLabError(f"clock is wall or cpu, not {clock!r}")
    components = load_components()
    ahead = target_ahead(experiment.target, announce, components)
    Setup.ahead(experiment, ahead, components).check()
    target = ahead.itself(experiment.target, announce, components)
    setup = Setup(experiment, target, components)
    built = setup.methods()
    built.leave_out_others()
    engines: dict[str, PlainEngine | SpeculativeEngine] = {PLAIN: setup.plain(), **built.engines}
    if experiment.decoding.compile != "none":
        announce(
            f"decoding.compile={experiment.decoding.compile}: one sequence has compiled passes; "
            "several that share a pass are read by the target without"
        )
    prompts = [prompt.tokens([]) for prompt in setup.prompts()]
    jobs = [
        Job(name, size, answering(setup, engine, size, prompts), target.device)
        for name, engine in engines.items()
        for size in (ALONE, *sizes)
    ]
    with torch_threads(experiment.evaluation.threads):
        header = setup.header()
        run(jobs, len(prompts), experiment, clock, announce)
    return {
        **header,
        "target": provenance.target_of(target) | {"lean": target.backbone.lean is not None},
        "experiment": to_plain(experiment),
        "prompts": len(prompts),
        "sizes": list(sizes),
        "clock": clock,
        "left_out": built.left_out,
        "methods": {
            name: {"label": built.labels.get(name, name), "lossless": engine.lossless}
            | points_of(name, jobs)
            for name, engine in engines.items()
        },
    }


def answering(
    setup: Setup, engine: PlainEngine | SpeculativeEngine, size: int, prompts: Sequence[Tensor]
) -> Callable[[int, int], list[Generation]]:
    """What a job does; every prompt has a seed of its own, whatever the size."""
    seed = setup.experiment.evaluation.seed
    shared: dict[str, Any] = {"sampling": setup.sampling, "stop": setup.stop}

    def answer(count: int, tokens: int) -> list[Generation]:
        asked = prompts[:count]
        draws = [
            torch.Generator(setup.target.device).manual_seed(seed + 1_000_003 * place)
            for place in range(len(asked))
        ]
        if size == ALONE:
            return [
                engine.generate(prompt, max_new_tokens=tokens, generator=generator, **shared)
                for prompt, generator in zip(asked, draws, strict=True)
            ]
        return engine.generate_batch(
            asked, batch_size=size, max_new_tokens=tokens, generators=draws, **shared
        )

    return answer


def run(
    jobs: Sequence[Job],
    prompts: int,
    experiment: Experiment,
    clock: str,
    announce: Callable[[str], None],
) -> None:
    """Warm every job up; then all of them in turns, each repeat beginning with another one."""
    announce(f"warming up {len(jobs)} methods and sizes")
    for job in jobs:
        job.answer(job.size + 1, WARM)
    repeats = max(1, experiment.evaluation.repeats)
    for repeat in range(repeats):
        announce(f"repeat {repeat + 1} of {repeats}")
        for job in rotated(jobs, repeat * len(jobs) // repeats):
            with Stopwatch(job.device) as watch:
                job.texts = job.answer(prompts, experiment.evaluation.max_new_tokens)
            job.seconds.append(watch.cpu if clock == "cpu" else watch.wall)


def points_of(method: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return a method's figures: ``alone`` and ``batches``."""
    truth = next(job.texts for job in jobs if (job.method, job.size) == (PLAIN, ALONE))
    points = [point(job, truth) for job in jobs if job.method == method]
    return {
        "alone": next(one for one in points if one["size"] == ALONE),
        "batches": [one for one in points if one["size"] != ALONE],
    }


def point(job: Job, truth: Sequence[Generation]) -> dict[str, Any]:
    """Return the figures of one method at one batch size."""
    tokens = sum(len(text.tokens) for text in job.texts)
    rounds = [one for text in job.texts for one in text.rounds]
    emitted = sum(one.emitted for one in rounds)
    right = sum(ours.tokens == text.tokens for ours, text in zip(job.texts, truth, strict=True))
    return {
        "size": job.size,
        "tokens": tokens,
        "seconds": median(job.seconds),
        "repeats": job.seconds,
        "tokens_per_second": tokens / median(job.seconds),
        "tau": emitted / len(rounds) if rounds else None,
        "identical": right / len(truth),
        "split": split([text.seconds for text in job.texts]),
    }


def split(seconds: Sequence[Seconds]) -> dict[str, float]:
    """Share of every part of the time, reading prompts included, in %."""
    names = [each.name for each in fields(seconds[0]) if each.name != "total"]
    parts = {name: sum(getattr(one, name) for one in seconds) for name in names}
    whole = sum(parts.values())
    return {name: 100 * taken / whole for name, taken in parts.items()}
