"""What of SGLang's interfaces the plug-in touches, as 0.5.23 has them, over a tiny target.

The scheduler's part (admitting, extending, taking tokens over) is ``Scheduler``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from serving_cases import Server, target

NODES = 6
REQUESTS = 3


class ForwardMode(Enum):
    """What a batch does."""

    EXTEND = 1
    DECODE = 2
    IDLE = 3

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE


@dataclass
class Request:
    """A request of the scheduler."""

    rid: str
    origin_input_ids_unpadded: list[int]
    output_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [*self.origin_input_ids_unpadded, *self.output_ids]


@dataclass
class Batch:
    """Requests, and which positions of their prompts are read."""

    reqs: list[Request]
    forward_mode: ForwardMode
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)


class CustomSpecAlgo:
    """A registered algorithm; it lacks what the scheduler asks for the future map."""

    def __init__(self, name: str, factory: Any, validate_server_args: Any, **given: Any) -> None:
        self.name, self.factory, self.validate_server_args = name, factory, validate_server_args

    def is_eagle(self) -> bool:
        return False

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        raise NotImplementedError

    def create_worker(self, server_args: Any) -> Any:
        return self.factory(server_args)


REGISTERED: dict[str, CustomSpecAlgo] = {}


class SpeculativeAlgorithm:
    """The enumeration with its registry."""

    NGRAM = SimpleNamespace(create_future_map=lambda *given, **named: "NGRAM's")

    @classmethod
    def register(
        cls,
        name: str,
        *,
        supports_overlap: bool = False,
        validate_server_args: Any = None,
        spec_class: Any = CustomSpecAlgo,
    ) -> Any:
        def decorate(factory: Any) -> Any:
            REGISTERED[name] = spec_class(
                name=name,
                factory=factory,
                supports_overlap=supports_overlap,
                validate_server_args=validate_server_args,
            )
            return factory

        return decorate


class BaseSpecWorker:
    """The base of all workers."""

    def __init__(self) -> None:
        self.begun = True


class NGRAMWorker(BaseSpecWorker):
    """Verifies trees from outside greedily, and reads prompts."""

    def __init__(self, *given: Any) -> None:
        raise AssertionError("a corpus was built")

    def alloc_memory_pool(self, **given: Any) -> None:
        self.allocated = True

    def forward_batch_generation(self, batch: Batch, on_publish: Any = None) -> Any:
        if batch.forward_mode.is_extend():
            parts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            rows = [Server.features(r.text[: s + n])[s:] for r, s, n in parts]
            added = [[int(target().head(each[-1]).argmax())] for each in rows]
        else:
            tokens, mask = self._prepare_draft_tokens(batch)
            shape = len(batch.reqs), NODES
            trees = zip(batch.reqs, tokens.reshape(shape), mask.reshape(*shape, NODES), strict=True)
            rows, added = zip(*[self.verified(*tree) for tree in trees], strict=True)
            self._update_ngram_corpus(batch)
            self.ngram_corpus.erase_match_state(["gone"])
        hidden = torch.cat(list(rows))
        return SimpleNamespace(added=added, logits_output=SimpleNamespace(hidden_states=hidden))

    @staticmethod
    def verified(request: Request, tokens: Any, mask: Any) -> tuple[torch.Tensor, list[int]]:
        rows = []
        for node in range(NODES):
            path = [int(tokens[i]) for i in np.flatnonzero(mask[node])]
            rows.append(Server.features([*request.text[:-1], *path])[-1])
        added, node = [], 0
        while True:
            added.append(int(target().head(rows[node]).argmax()))
            below = [
                child
                for child in range(NODES)
                if tokens[child] == added[-1]
                and mask[child][node]
                and mask[child].sum() == mask[node].sum() + 1
            ]
            if not below:
                return torch.stack(rows), added
            node = below[0]


def runtime(**values: Any) -> Any:
    return lambda: SimpleNamespace(**values)


MODULES = {
    "speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
    "speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
    "speculative.base_spec_worker": {"BaseSpecWorker": BaseSpecWorker},
    "speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker},
    "runtime_context": {
        "get_device": runtime(device="cpu"),
        "get_schedule": runtime(page_size=1),
        "get_spec": runtime(
            speculative_num_draft_tokens=NODES, speculative_num_steps=5, speculative_eagle_topk=1
        ),
    },
}


@contextmanager
def sglang() -> Iterator[dict[str, CustomSpecAlgo]]:
    """SGLang as if it were installed; yields what is registered."""
    names = ["sglang", "sglang.srt", "sglang.srt.speculative"]
    made = {name: ModuleType(name) for name in names}
    for name, content in MODULES.items():
        module = made.setdefault(f"sglang.srt.{name}", ModuleType(f"sglang.srt.{name}"))
        vars(module).update(content)
    before = dict(sys.modules)
    sys.modules.update(made)
    REGISTERED.clear()
    try:
        yield REGISTERED
    finally:
        for name in {*made, "falcon_lab_serving.sglang_worker"} - set(before):
            sys.modules.pop(name, None)


class Scheduler:
    """Admits requests in chunks and decodes them together, without overlap."""

    def __init__(
        self, algorithm: CustomSpecAlgo, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        config = SimpleNamespace(
            model_path="tiny", hf_config=target().model.config, context_len=200
        )
        runner = SimpleNamespace(
            model_config=config,
            model=SimpleNamespace(get_embed_and_head=lambda: tables),
            max_running_requests=REQUESTS,
        )
        targets = SimpleNamespace(model_runner=runner, tokenizer=target().tokenizer)
        self.worker = algorithm.create_worker(None)(
            server_args=None, gpu_id=0, nccl_port=0, target_worker=targets
        )
        self.worker.target_worker = targets
        self.worker.alloc_memory_pool(memory_pool_config=None)
        self.running: list[Request] = []
        self.rounds = 0

    def admit(self, name: str, prompt: list[int], chunk: int) -> Request:
        request = Request(name, prompt)
        for start in range(0, len(prompt), chunk):
            length = min(chunk, len(prompt) - start)
            batch = Batch([request], ForwardMode.EXTEND, [start], [length])
            result = self.worker.forward_batch_generation(batch)
        request.output_ids += result.added[0]
        self.running.append(request)
        return request

    def decode(self) -> None:
        batch = Batch(list(self.running), ForwardMode.DECODE)
        result = self.worker.forward_batch_generation(batch, on_publish=None)
        self.rounds += 1
        for request, added in zip(batch.reqs, result.added, strict=True):
            request.output_ids += added
