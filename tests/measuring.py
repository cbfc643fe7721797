"""Engines, prompts and measurements with known figures."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from falcon_lab.decoding.generation import Generation, Round, Seconds
from falcon_lab.measure import provenance
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.measurement import Measurement
from falcon_lab.measure.records import Answer, Record, RoundColumns, Times


class Letters:
    """A tokenizer of single characters; id 0 is the end of a text."""

    eos_token_id = 0
    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(t) for t in tokens if t)


class ChatLetters(Letters):
    """The same with a chat template."""

    chat_template = "{{ messages }}"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
        return text + "<a>" * add_generation_prompt


class Scripted:
    """Answers a prompt with fixed tokens and fixed times, and writes down that it was asked."""

    def __init__(
        self,
        answer: list[int],
        *,
        rounds: list[Round] | None = None,
        seconds: Seconds | None = None,
        log: list[tuple[str, str]] | None = None,
        name: str = "",
        lossless: bool = True,
        pause: float = 0.0,
    ) -> None:
        self.answer = answer
        self.rounds = rounds or []
        self.seconds = seconds or Seconds(prefill=0.1, verify=0.9, total=0.9)
        self.log = log if log is not None else []
        self.name = name
        self.lossless = lossless
        self.opaque = False
        self.pause = pause
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.threads: list[int] = []

    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sampling: Any,
        generator: torch.Generator,
        stop: Any,
    ) -> Generation:
        self.prompts.append(prompt.tolist())
        self.seeds.append(generator.initial_seed())
        self.threads.append(torch.get_num_threads())
        self.log.append((self.name, "".join(map(chr, prompt.tolist()))))
        time.sleep(self.pause)
        return Generation(self.answer[:max_new_tokens], "length", self.rounds, self.seconds)


def prompt(id: str, *turns: str, tokenizer: Any = None, chat: bool = False) -> EncodedPrompt:
    return EncodedPrompt(id, "letters", turns, tokenizer or Letters(), chat)


def row(
    method: str,
    id: str = "p0",
    *,
    tokens: list[int] | None = None,
    wall: float = 1.0,
    accepted: Sequence[int] = (),
    depth: int = 4,
    identical: bool | None = None,
    difference: int | None = None,
    margin: float | None = None,
    text: str = "",
) -> Record:
    """A row whose rounds draft ``depth`` tokens and accept the given numbers of tokens."""
    rounds = RoundColumns(
        nodes=[2 * depth] * len(accepted),
        depth=[depth] * len(accepted),
        passes=[depth // 2] * len(accepted),
        accepted=list(accepted),
        emitted=[a + 1 for a in accepted],
    )
    decode = 0.9 * wall
    times = Times(
        wall=wall,
        prefill=0.05 * wall,
        decode=decode,
        draft=0.2 * decode,
        verify=0.6 * decode,
        accept=0.05 * decode,
        commit=0.05 * decode,
        overhead=0.1 * decode,
    )
    new = tokens if tokens is not None else list(range(1, 2 + sum(rounds.emitted)))
    turn = Answer(8, new, text, "length", times, rounds)
    return Record(
        method,
        id,
        "letters",
        [turn],
        [wall],
        identical=identical,
        difference_turn=None if difference is None else 0,
        difference_position=difference,
        margin=margin,
    )


def measurement(prompts: int = 8, *, diverging: bool = False, lossy: bool = False) -> Measurement:
    """Plain, HF generate, a chain and a tree over prompts of differing difficulty."""
    dice = random.Random(0)
    rows: dict[str, list[Record]] = {"plain": [], "HF generate": [], "chain": [], "tree": []}
    for number in range(prompts):
        tokens = [dice.randrange(300) for _ in range(128)]
        hard = dice.uniform(0.9, 1.2)
        text = SAMPLE.format(number=number)
        rows["plain"].append(
            row(
                "plain",
                f"heldout/{number}",
                tokens=tokens,
                wall=0.9 * hard,
                accepted=[0] * 127,
                depth=0,
                text=text,
            )
        )
        opaque = row("HF generate", f"heldout/{number}", tokens=tokens, wall=1.6, identical=True)
        rows["HF generate"].append(_opaque(opaque))
        for method, depth, hit in (("chain", 6, 0.72), ("tree", 8, 0.82)):
            accepted = _rounds(dice, depth, hit)
            differs = diverging and method == "tree" and number == 3
            rows[method].append(
                row(
                    method,
                    f"heldout/{number}",
                    tokens=[*tokens[:-1], 1] if differs else tokens,
                    wall=0.012 * hard * len(accepted),
                    accepted=accepted,
                    depth=depth,
                    identical=not differs,
                    difference=127 if differs else None,
                    margin=0.003 if differs else None,
                    text=text,
                )
            )
    lossless = dict.fromkeys(rows, True) | {"tree": not lossy}
    return Measurement(rows, lossless, repeats=3, warmup=1)


def _rounds(dice: random.Random, depth: int, hit: float) -> list[int]:
    accepted: list[int] = []
    while sum(accepted) + len(accepted) < 127:
        run = 0
        while run < depth and dice.random() < hit:
            run += 1
        accepted.append(run)
    return accepted


def _opaque(full: Record) -> Record:
    from dataclasses import replace

    turn = full.turns[0]
    return replace(full, turns=[replace(turn, times=Times(turn.times.wall), rounds=RoundColumns())])


SAMPLE = '''    """Return the mean of the values, item {number}."""
    total = 0
    for value in values:
        total += value
    return total / len(values) if values else 0


class Basket:
    """Holds fruit <and> & such."""
'''

TREE = {
    "tokens": list(range(14)),
    "parents": [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 10, 3],
    "accepted": [0, 1, 4, 7, 10],
    "texts": [
        "return",
        " total",
        " sum",
        " value",
        " /",
        " +",
        "(",
        " len",
        " max",
        " 1",
        "(",
        "\n",
        "items",
        "\n\t",
    ],
    "next": "values",
    "prompt": "heldout/0",
    "method": "tree",
    "round": 7,
}

HISTORY = [
    {
        "step": step,
        "train/loss": 3.0 * 0.994**step + 0.6,
        "train/position_1/accuracy": 0.8 - 0.6 * 0.99**step,
        "train/position_2/accuracy": 0.7 - 0.6 * 0.992**step,
        "train/glance_ratio": 0.4 * (1 - step / 500),
        **(
            {"val/loss": 3.1 * 0.994**step + 0.7, "val/accept_rate": 0.75 - 0.6 * 0.99**step}
            if step % 100 == 0
            else {}
        ),
    }
    for step in range(10, 501, 10)
]

EXPERIMENT = {
    "name": "csgd",
    "seed": 0,
    "out": "runs/csgd",
    "data": {"corpus": "generated", "seed": 0},
    "drafter": {"name": "falcon", "block": 2},
    "trainer": {"max_steps": 500},
    "evaluation": {
        "prompts": {"name": "heldout", "limit": 8},
        "max_new_tokens": 128,
        "temperature": 0.0,
        "seed": 0,
        "methods": {"chain": {"drafter": None}, "tree": {"drafter": None}},
    },
    "report": {"html": True, "title": None},
}

TARGET = {
    "name": "tiny-code",
    "revision": None,
    "fingerprint": "5f2c9a1b",
    "dtype": "torch.float32",
    "quality": {
        "loss": 0.71,
        "parse": 1.0,
        "distinct": 0.55,
        "completions": 16,
        "passed": True,
        "verdict": "16 of 16 completions parse, 0.55 distinct tokens",
    },
    "tuning": None,
}

_HARDWARE = {
    "cpu": "Example CPU @ 2.50GHz",
    "cores": 2,
    "threads": 1,
    "load": 0.4,
    "system": "Linux 6.1 x86_64",
    "device": "cpu",
    "gpu": None,
    "gpu_memory_bytes": None,
    "cuda": None,
    "dtype": "torch.float32",
}

HEADER: dict[str, Any] = {
    "date": "2026-11-22T05:00:00+00:00",
    "command": "lightning run smoke.yaml",
    "versions": provenance.versions(),
    "hardware": _HARDWARE,
    "git": {"commit": "0" * 40, "dirty": False},
}
