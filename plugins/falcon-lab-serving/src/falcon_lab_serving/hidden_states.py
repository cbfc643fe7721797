"""vLLM's hidden states as files (0.32): a connector for its method ``extract_hidden_states``.

vLLM keeps the states of some layers where keys and values are kept, as if they were a layer of a
drafter's; a connector takes them from there when a text has been read. This one writes a file a
text, on any device: vLLM's own example needs CUDA. ``extract.py`` runs it; a server takes it too:

    --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 8, 16]}}}'
    --kv-transfer-config '{"kv_connector": "HiddenStatesWriter", "kv_role": "kv_producer",
        "kv_connector_module_path": "falcon_lab_serving.hidden_states",
        "kv_connector_extra_config": {"folder": "states"}}'

Layers are counted as in ``falcon_lab.data.state_files``. A file is written in the step after its
text's last one, so that one more text must follow the last.

Shapes: T tokens of a text, L layers, H hidden, B blocks, S slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from falcon_lab.data.state_files import file_of, write_states

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReadText:
    """A text that has been read.

    Attributes:
        request: its id.
        tokens: of the prompt.
        blocks: where its states are.
    """

    request: str
    tokens: list[int]
    blocks: list[int]


@dataclass
class ReadTexts(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler hands the worker with a step."""

    texts: list[ReadText] = field(default_factory=list)


class HiddenStatesWriter(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Writes the states of every prompt into ``folder`` of its extra configuration.

    Args:
        vllm_config: of the engine.
        role: the scheduler's or the worker's side.
        kv_cache_config: the groups of layers that share blocks.

    Raises:
        ValueError: there is no folder, no group of hidden states, or no layer of an id.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "folder" not in extra:
            raise ValueError("kv_connector_extra_config has no folder; name one for the files")
        self._config = vllm_config
        self._folder = Path(extra["folder"])
        self._group = group_of(kv_cache_config)
        drafter = vllm_config.speculative_config.draft_model_config.hf_config
        most = vllm_config.model_config.get_total_num_hidden_layers()
        self._layers = checked(drafter.eagle_aux_hidden_state_layer_ids, most)
        self._read: list[ReadText] = []
        self._kept: Tensor | None = None

    # --- the scheduler's side -------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Return that nothing is known of any text."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        """Do nothing: only what is computed here is kept."""

    def build_connector_meta(self, scheduler_output: Any) -> ReadTexts:
        """Hand over the texts that have been read since the last step."""
        read, self._read = self._read, []
        return ReadTexts(read)

    def request_finished(
        self, request: Any, blocks: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a text's blocks until its file is written, and say where that will be."""
        tokens = list(request.prompt_token_ids)
        if request.num_computed_tokens < len(tokens):  # given up before all of it was read
            return False, None
        self._read.append(ReadText(request.request_id, tokens, list(blocks)))
        return True, {"hidden_states_path": str(file_of(self._folder, tokens))}

    def request_finished_all_groups(
        self, request: Any, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same with the blocks of the group of hidden states."""
        if self._group >= len(blocks):  # a text that was given up before it was begun
            return False, None
        return self.request_finished(request, blocks[self._group])

    # --- the worker's side ----------------------------------------------------------------------

    def get_finished_count(self) -> int:
        """Return that one of the workers writes, whose word frees the blocks of all."""
        return 1

    def register_kv_caches(self, caches: dict[str, Tensor]) -> None:
        """Find the states among the caches."""
        layers = get_layers_from_vllm_config(self._config, CacheOnlyAttentionLayer, list(caches))
        if len(layers) != 1:
            raise ValueError(f"{len(layers)} layers keep hidden states; one is needed")
        self._kept = caches[next(iter(layers))]

    def start_load_kv(self, context: Any, **others: Any) -> None:
        """Do nothing: nothing is loaded."""

    def wait_for_layer_load(self, name: str) -> None:
        """Do nothing: nothing is loaded."""

    def save_kv_layer(self, name: str, layer: Any, metadata: Any, **others: Any) -> None:
        """Do nothing: states are taken when a text has been read."""

    def wait_for_save(self) -> None:
        """Do nothing: files are written at once."""

    def get_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write the files of the texts that were handed over, whose blocks are free then."""
        handed = self._get_connector_metadata() if self.has_connector_metadata() else ReadTexts()
        if self._kept is None or get_tensor_model_parallel_rank():
            return None, None
        for text in handed.texts:
            self._write(text, self._kept)
        return {text.request for text in handed.texts} or None, None

    def _write(self, text: ReadText, kept: Tensor) -> None:
        """Write ``[T, L, H]`` of a text."""
        blocks = torch.tensor(text.blocks, device=kept.device)
        states = kept[blocks].transpose(1, 2).flatten(0, 1)[: len(text.tokens)]  # [B·S, L, H]
        write_states(self._folder, text.tokens, states, self._layers)


def checked(layers: Sequence[int], most: int) -> list[int]:
    """Return ids of layers, each once and of a target with so many.

    Raises:
        ValueError: there are none, or the target has no such layer.
    """
    found = [int(layer) for layer in layers]
    if not found or len(set(found)) < len(found) or min(found) < 0 or max(found) > most:
        raise ValueError(f"layers {found}: the target has 0 to {most}; name some, each once")
    return found


def group_of(config: Any) -> int:
    """Return the group of layers that keeps hidden states.

    Raises:
        ValueError: there is none.
    """
    groups = [] if config is None else config.kv_cache_groups
    for number, group in enumerate(groups):
        if isinstance(group.kv_cache_spec, HiddenStateCacheSpec):
            return number
    if len(groups) <= 1:
        return 0
    raise ValueError("no group of layers keeps hidden states; set method extract_hidden_states")
