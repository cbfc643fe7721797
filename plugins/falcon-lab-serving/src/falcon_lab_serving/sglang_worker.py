"""The worker of SGLang's scheduler; imported by a server alone, as it derives from SGLang's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_device, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from falcon_lab_serving.host import ServedTarget
from falcon_lab_serving.loading import load_served
from falcon_lab_serving.names import tree_node

if TYPE_CHECKING:
    from falcon_lab_serving.drafting import ServedDrafter


class FalconLabWorker(NGRAMWorker):  # type: ignore[misc]
    """Drafts with a saved drafter; verification and sampling are NGRAM's.

    Args:
        server_args: of the server.
        gpu_id: of the target; not used.
        nccl_port: not used.
        target_worker: runs the target.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        BaseSpecWorker.__init__(self)  # NGRAM's own builds a corpus
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.enable_overlap = False
        self.page_size = get_schedule().page_size
        self.device = get_device().device
        self.draft_token_num = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self.draft_token_num
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.topk = get_spec().speculative_eagle_topk
        self.adaptive_controller = None
        self.grammar_tree_host = None
        self._prev_decode_rids: set[str] = set()
        self.ngram_corpus = NoCorpus()
        self._served: ServedDrafter | None = None

    def alloc_memory_pool(self, **given: Any) -> None:
        """Load the drafter too, as the number of requests is known now."""
        super().alloc_memory_pool(**given)
        self._served = served_drafter(self)

    @property
    def served(self) -> ServedDrafter:
        """Return what drafts."""
        assert self._served is not None, "the scheduler allocates before it runs"
        return self._served

    def clear_cache_pool(self) -> None:
        """Forget all requests."""
        self.served.clear()

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
        texts = {
            each.rid: [*each.origin_input_ids_unpadded, *each.output_ids] for each in batch.reqs
        }
        trees = self.served.draft(texts)
        tokens = np.array([tree.tokens for tree in trees], dtype=np.int64)
        mask = np.array([tree.ancestors() for tree in trees], dtype=bool)
        return tokens.reshape(-1), mask.reshape(-1)

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Leave the texts alone: nothing is looked up in them."""

    def forward_batch_generation(self, batch: Any, *given: Any, **named: Any) -> Any:
        """Draft, verify, and keep the features."""
        mode = batch.forward_mode
        parts = []
        if mode.is_extend():
            parts = list(zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True))
        result = super().forward_batch_generation(batch, *given, **named)
        if mode.is_idle():
            return result
        rows = result.logits_output.hidden_states
        if parts:
            split = torch.split(rows, [length for _, _, length in parts])
            for (request, start, _), features in zip(parts, split, strict=True):
                self.served.read(request.rid, start, features)
            return result
        trees = rows.unflatten(0, (-1, self.draft_token_num))
        for request, features in zip(batch.reqs, trees, strict=True):
            self.served.verified(request.rid, features)
        return result


class NoCorpus:
    """What NGRAM forgets of requests that have left; they are forgotten elsewhere."""

    def erase_match_state(self, requests: list[str]) -> None:
        """Do nothing: a request that makes room is the one that was not decoded for longest."""


def served_drafter(worker: Any) -> ServedDrafter:
    """Load the drafter onto the target of a worker.

    Raises:
        FalconLabError: as ``load_served``.
    """
    runner, nodes = worker.model_runner, worker.draft_token_num
    config, tokenizer = runner.model_config, worker.target_worker.tokenizer
    embeddings, head = runner.model.get_embed_and_head()
    return load_served(
        ServedTarget(config.model_path, embeddings, head, config.hf_config, tokenizer),
        tree_node(nodes),
        nodes=nodes,
        places=runner.max_running_requests,
        positions=config.context_len + nodes,
    )
