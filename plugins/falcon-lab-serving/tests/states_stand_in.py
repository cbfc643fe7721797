"""What of vLLM's interfaces the connector and the command touch, as 0.32 has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

LAYERS, SLOTS, HIDDEN, MOST = [1, 3], 4, 5, 3
RANK = SimpleNamespace(number=0)


class Connector:
    """The base of connectors."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.metadata: Any = None

    def has_connector_metadata(self) -> bool:
        return self.metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


class HiddenStates:
    """The spec of the group that keeps hidden states, and the layer that does."""


PARTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {"get_layers_from_vllm_config": lambda config, kind, names: names},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": Connector,
        "KVConnectorMetadata": type("Metadata", (), {}),
        "SupportsHMA": type("SupportsHMA", (), {}),
    },
    "vllm.distributed.parallel_state": {
        "get_tensor_model_parallel_rank": lambda: RANK.number,
    },
    "vllm.model_executor.models.extract_hidden_states": {"CacheOnlyAttentionLayer": HiddenStates},
    "vllm.v1.kv_cache_interface": {"HiddenStateCacheSpec": HiddenStates},
}


@contextmanager
def vllm(**more: Any) -> Iterator[None]:
    """The modules that are imported; ``more`` is what the first one has."""
    made = {name: ModuleType(name) for name in PARTS}
    for name, parts in PARTS.items():
        vars(made[name]).update(parts)
    vars(made["vllm"]).update(more)
    ours = "falcon_lab_serving.hidden_states"
    before = {name: sys.modules.pop(name, None) for name in (*made, ours)}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def config(folder: Path | None, layers: Sequence[int] = LAYERS) -> Any:
    """The engine's configuration."""
    extra = {} if folder is None else {"folder": str(folder)}
    drafter = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(layers))
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: MOST),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=drafter)),
    )


def groups(*kinds: object) -> Any:
    """The groups of layers that share blocks."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind) for kind in kinds])


class Engine:
    """Both sides of a connector; states are kept in blocks that lie anywhere."""

    def __init__(self, make: Any, folder: Path) -> None:
        both = groups(object(), HiddenStates())
        self.scheduler, self.worker = (make(config(folder), role, both) for role in "sw")
        self.kept = torch.randn(20, len(LAYERS), SLOTS, HIDDEN)
        self.worker.register_kv_caches({"states": self.kept})

    def states(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """What is kept of a text, position by position."""
        rows = [self.kept[block, :, slot] for block in blocks for slot in range(SLOTS)]
        return torch.stack(rows[:tokens])

    def finish(self, name: str, tokens: list[int], blocks: list[int], read: int) -> Any:
        """A text ends of which so much was read."""
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=tokens, num_computed_tokens=read
        )
        return self.scheduler.request_finished_all_groups(request, ([19], blocks))

    def step(self) -> set[str] | None:
        """The worker's part of a step; the texts whose blocks are free."""
        self.worker.metadata = self.scheduler.build_connector_meta(None)
        free: set[str] | None = self.worker.get_finished(set())[0]
        return free
