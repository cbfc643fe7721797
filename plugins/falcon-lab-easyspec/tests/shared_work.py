"""What both processes of ``test_processes.py`` do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from easyspec_cases import LAYERS, VOCAB
from falcon_lab_easyspec import EasySpecConfig
from falcon_lab_easyspec.processes import connected, drafter_of
from torch import Tensor

from falcon_lab import testing
from falcon_lab.model.passes import NewPositions
from falcon_lab.model.target import Target
from falcon_lab.testing.targets import tiny_model, tiny_tokenizer

PROMPT = [5, 9, 3, 11, 7]


class Work(NamedTuple):
    states: Tensor
    text: list[int]
    accepted: list[int]


def lean_target(dtype: torch.dtype = torch.float32) -> Target:
    model = tiny_model("llama", vocab=VOCAB, layers=LAYERS).to(dtype)
    return Target(model, tiny_tokenizer(VOCAB), name="lean", lean=True)


def states_under(target: Target, plan: object) -> Tensor:
    cache = target.new_cache(16)
    target.prefill(torch.tensor(PROMPT), cache)
    new = NewPositions(torch.tensor([5, 6]), torch.tensor([[True, False], [True, True]]), cache)
    return target.run_part(torch.tensor([2, 8]), new, plan)


def work(store: str) -> Work:
    """Run a pass in bfloat16, and decode a text in float32."""
    with connected(torch.device("cpu"), init=f"file://{store}", seconds=60) as processes:
        config = EasySpecConfig(size=3)  # groups of three and one layer, on two processes
        half = lean_target(torch.bfloat16)
        states = states_under(half, drafter_of(half, config, processes).plan)
        target = lean_target()
        engine = testing.engine(target, drafter_of(target, config, processes))
        found = testing.write(engine, PROMPT, 24)
        return Work(states, found.tokens, [one.accepted for one in found.rounds])
