"""What of vLLM's interfaces the proposer touches, as 0.32 has them, over a tiny target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from serving_cases import Server, target
from torch import nn

LONGEST = 60
CONTEXT = SimpleNamespace(attn_metadata=None)


@contextmanager
def vllm() -> Iterator[None]:
    """The only module of vLLM's that is imported."""
    made = {name: ModuleType(name) for name in ("vllm", "vllm.forward_context")}
    vars(made["vllm.forward_context"])["get_forward_context"] = lambda: CONTEXT
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


class Model(nn.Module):
    """The target's module, which returns the features of all tokens in one row."""

    def __init__(self) -> None:
        super().__init__()
        model = target().model
        self.model = SimpleNamespace(embed_tokens=model.get_input_embeddings())
        self.lm_head = model.get_output_embeddings()
        self.texts: list[list[int]] = []

    def forward(self, positions: torch.Tensor, parts: list[tuple[int, int]]) -> torch.Tensor:
        rows = [
            Server.features(text[: start + length])[start:]
            for text, (start, length) in zip(self.texts, parts, strict=True)
        ]
        padding = torch.zeros(3, rows[0].shape[1])  # a runner pads its batches
        return torch.cat([*rows, padding])


@dataclass
class Request:
    """A request: its text, what of it was computed, and its draft tokens."""

    prompt: list[int]
    text: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


class Runner:
    """Runs batches whose rows may change places, with prompts in chunks."""

    def __init__(self, proposer: Any, chunk: int) -> None:
        self.proposer, self.chunk, self.model = proposer, chunk, Model()
        self.batch: list[Request] = []
        self.rounds = 0
        proposer.load_model(self.model)
        CONTEXT.attn_metadata = None
        self.model.texts = [[1, 2]]
        self.model(positions=torch.arange(2), parts=[(0, 2)])  # measures its memory

    def admit(self, prompt: list[int]) -> Request:
        request = Request(prompt, list(prompt))
        self.batch.append(request)
        return request

    def step(self) -> None:
        parts = []
        for one in self.batch:
            left = len(one.text) + len(one.drafts) - one.computed
            parts.append((one.computed, min(left, self.chunk)))
        self.model.texts = [[*one.text, *one.drafts] for one in self.batch]
        self.rounds += any(one.drafts for one in self.batch)
        starts = np.cumsum([0, *(length for _, length in parts)])
        CONTEXT.attn_metadata = {"layer": SimpleNamespace(query_start_loc=torch.tensor(starts))}
        positions = [
            position for start, length in parts for position in range(start, start + length)
        ]
        rows = self.model(positions=torch.tensor(positions), parts=parts)
        added = [
            self.verified(one, rows[a:b])
            for one, a, b in zip(self.batch, starts, starts[1:], strict=False)
        ]
        lengths = np.array([len(one.text) for one in self.batch])
        tokens = np.zeros((len(self.batch) + 1, LONGEST), dtype=np.int32)
        for i, one in enumerate(self.batch):
            tokens[i, : len(one.text)] = one.text
        drafts = self.proposer.propose(added, lengths, tokens, slot_mappings=None)
        for one, new in zip(self.batch, drafts, strict=True):
            one.drafts = new
        self.batch.reverse()

    @staticmethod
    def verified(one: Request, rows: torch.Tensor) -> list[int]:
        read = one.computed + len(rows)
        if read < len(one.text):
            one.computed = read
            return []
        wanted = target().head(rows).argmax(-1).tolist()[len(rows) - 1 - len(one.drafts) :]
        added = [wanted[0]]
        for draft, token in zip(one.drafts, wanted[1:], strict=True):
            if draft != added[-1]:
                break
            added.append(token)
        one.text += added
        one.computed = len(one.text) - 1
        return added


def config(**changed: Any) -> Any:
    """The engine's configuration."""
    parts = {
        "model_config": {
            "model": "tiny",
            "tokenizer": "tiny",
            "hf_config": target().model.config,
            "max_model_len": LONGEST,
            "enforce_eager": True,
        },
        "cache_config": {"enable_prefix_caching": False},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "scheduler_config": {"max_num_seqs": 2},
        "speculative_config": {"num_speculative_tokens": 4},
    }
    for part in parts.values():
        part |= {name: value for name, value in changed.items() if name in part}
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})
