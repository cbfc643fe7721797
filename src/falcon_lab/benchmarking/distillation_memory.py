"""Peak memory of a training step's forward and backward pass at a given shape.

Every measurement is a process of its own, so that its peak is too:
``python -m falcon_lab.benchmarking.distillation_memory '{"vocabulary": 131072, …}'``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from falcon_lab.benchmarking.memory import peak_of
from falcon_lab.benchmarking.straightforward import Manner, StraightforwardLoop
from falcon_lab.builtins import CsgdConfig, FalconConfig, FalconObjectiveConfig
from falcon_lab.data.batch import Batch
from falcon_lab.distillation.module import Distillation
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.glancing.csgd import Csgd
from falcon_lab.objectives.falcon import FalconObjective
from falcon_lab.protocols import BuildContext
from falcon_lab.schema import DistillationConfig
from falcon_lab.targets.target import Target

WARM_UP = 16
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return {"shape": asdict(shape), "error": last[0]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(shape: Shape) -> dict[str, Any]:
    """Bytes and seconds of one forward and backward pass, after a small one."""
    module = _module(shape)
    loop = StraightforwardLoop(module, Manner(teach_each=True)) if shape.whole else None

    def run(batch: Batch) -> float:
        if loop is None:
            whole, tally = module.lesson(batch).learn(GLANCING)
            rows = tally.reduced()["train/loss"][1]
            loss = whole / rows
        else:
            loss = loop.loss(batch)
        loss.backward()
        return float(loss.detach())

    run(_batch(shape, 1, WARM_UP))
    batch = _batch(shape, shape.sequences, shape.length)
    started = perf_counter()
    losses: list[float] = []
    peak = peak_of(lambda: losses.append(run(batch)), torch.device("cpu"))
    if peak is None:
        raise FalconLabError("this system does not tell how much memory a process had at its peak")
    seconds = perf_counter() - started
    return {"shape": asdict(shape), **asdict(peak), "seconds": seconds, "loss": losses[0]}


def _module(shape: Shape) -> Distillation:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=1,
        num_attention_heads=max(1, shape.hidden // 128),
        max_position_embeddings=max(shape.length, WARM_UP),
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
