"""``falcon-lab check``: is the output with this drafter, tree and rule the target's own?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch

from falcon_lab.commands.settings import load, speculative
from falcon_lab.config.schema import Experiment
from falcon_lab.decoding.losslessness import greedy_equality, sampled_distance
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import encode_prompts
from falcon_lab.measure.engines import sampling_of, stop_of
from falcon_lab.measure.prompts import load_prompts
from falcon_lab.model.target import Target

EXACT = (torch.float32, torch.float64)
"""Types in which differently shaped kernels still agree on the most likely token."""


def is_lossless(
    experiment: Experiment,
    drafter: Path | None,
    overrides: Sequence[str],
    *,
    prompts: int,
    samples: int,
) -> bool:
    """Compare greedy texts and sampled distributions with plain decoding's; whether both agree."""
    target = load(experiment, lambda line: click.echo(line, err=True))
    engine = speculative(experiment, target, drafter, overrides)
    if engine is None:
        raise FalconLabError("name the drafter to check: --drafter DIR or drafter.name=NAME")
    plain = PlainEngine(target, decoding=experiment.decoding)
    stop = stop_of(experiment, target)
    tokens = prompt_tokens(experiment, target, prompts)
    config = experiment.evaluation
    greedy = greedy_equality(plain, engine, tokens, max_new_tokens=config.max_new_tokens, stop=stop)
    click.echo(greedy.verdict)
    if not greedy.passed and target.dtype not in EXACT:
        click.echo(
            f"{target.dtype} kernels of other shapes round differently; "
            "check with target.dtype=float32"
        )
    sampling = sampling_of(experiment)
    sampled = sampled_distance(
        plain,
        engine,
        tokens,
        sampling=replace(sampling, temperature=1.0) if sampling.greedy else sampling,
        stop=stop,
        samples=samples,
        seed=config.seed,
    )
    click.echo(sampled.verdict)
    if not engine.lossless:
        name = experiment.acceptance["name"]
        click.echo(f"NOT lossless: acceptance rule {name!r} is lossy by its own word")
    return engine.lossless and greedy.passed and sampled.passed


def prompt_tokens(experiment: Experiment, target: Target, count: int) -> list[torch.Tensor]:
    """The first ``count`` prompts, each ``[P]`` long."""
    prompts = load_prompts(
        replace(experiment.evaluation.prompts, limit=count),
        corpus=experiment.data.corpus,
        tokenizer=target.tokenizer,
        seed=experiment.data.seed,
    )
    encoded = encode_prompts(prompts, target.tokenizer, device=target.device)
    return [prompt.tokens([]) for prompt in encoded]
