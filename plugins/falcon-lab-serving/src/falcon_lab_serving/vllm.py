"""vLLM's side (0.32): a proposer for ``method: custom_class``.

    vllm serve TARGET --enforce-eager --no-enable-prefix-caching --speculative-config '{"method":
        "custom_class", "model": "falcon_lab_serving.vllm.FalconLabProposer",
        "num_speculative_tokens": 4}'

vLLM gives such a proposer the target's module when that is loaded, and then tokens alone. Features
are what the module returns, which a hook of torch's keeps; which request a row belongs to is
told by its position and its text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from falcon_lab_serving.names import DRAFTER

if TYPE_CHECKING:
    from torch import Tensor

    from falcon_lab_serving.drafting import ServedDrafter


class FalconLabProposer:
    """Proposes chains for all requests of a batch.

    Args:
        vllm_config: of the engine.

    Raises:
        ValueError: the engine runs in a way in which features are not seen.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_config(vllm_config)
        self._config = vllm_config
        self._tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._served: ServedDrafter | None = None
        self._rows: list[tuple[int, Tensor]] = []
        self._texts: dict[str, list[int]] = {}
        self._numbers = count()

    def load_model(self, model: Any) -> None:
        """Load the drafter onto the target, and listen to it.

        Args:
            model: the target's module.

        Raises:
            FalconLabError: as ``load_served``.
        """
        from transformers import AutoTokenizer

        from falcon_lab_serving.host import ServedTarget
        from falcon_lab_serving.loading import load_served

        config = self._config.model_config
        tables = model.model.embed_tokens.weight, model.lm_head.weight
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
        self._served = load_served(
            ServedTarget(config.model, *tables, config.hf_config, tokenizer),
            {"name": "chain", "depth": self._tokens},
            nodes=self._tokens + 1,
            places=self._config.scheduler_config.max_num_seqs,
            positions=self._longest + self._tokens + 1,
        )
        model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, given: Any, named: dict[str, Any], output: Any) -> None:
        """Keep the features of a pass, request by request, in the order of the batch."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not metadata:
            return  # no requests: vLLM measures its memory
        first = next(iter(metadata.values()))
        starts, positions = first.query_start_loc.tolist(), named["positions"].tolist()
        self._rows = [(positions[a], output[a:b].clone()) for a, b in pairwise(starts) if a < b]

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for every request; none for one whose prompt is still being read.

        Args:
            sampled_token_ids: what the last pass added to each.
            num_tokens_no_spec: length of each text, with what was added.
            token_ids_cpu: a row of tokens for each.
            slot_mappings: not used.
        """
        assert self._served is not None, "vLLM loads a model before it runs it"
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        texts = [token_ids_cpu[i, :length].tolist() for i, length in enumerate(lengths)]
        names: list[str] = []
        for text, (start, rows) in zip(texts, self._rows, strict=True):
            names.append(self._name(text, start, names))
            self._served.read(names[-1], start, rows[: len(text) - 1 - start])
        self._texts = {name: text for name, text in self._texts.items() if self._served.knows(name)}
        ready = {
            name: text
            for name, text, added in zip(names, texts, sampled_token_ids, strict=True)
            if added
        }
        trees = dict(zip(ready, self._served.draft(ready), strict=True))
        return [
            trees[name].tokens[1:][: max(self._longest - len(text), 0)] if name in trees else []
            for name, text in zip(names, texts, strict=True)
        ]

    def _name(self, text: list[int], start: int, taken: list[str]) -> str:
        """Return the request whose text goes on like this from ``start``, or a new one's name."""
        assert self._served is not None
        for name, before in self._texts.items():
            if name in taken or start == 0 or self._served.known(name) != start:
                continue
            if text[: len(before)] == before:
                self._texts[name] = text
                return name
        name = str(next(self._numbers))
        self._texts[name] = text
        return name


def check_config(vllm_config: Any) -> None:
    """Refuse an engine in which a hook does not see the features of all positions.

    Raises:
        ValueError: naming the argument or the variable, as vLLM's own checks do.
    """
    parallel = vllm_config.parallel_config
    problems = {
        "start vLLM with --enforce-eager, as a graph's replay calls no hook": (
            not vllm_config.model_config.enforce_eager
        ),
        "start vLLM with --no-enable-prefix-caching, as cached prompts have no features": (
            vllm_config.cache_config.enable_prefix_caching
        ),
        "run on one device: the target's tables are taken whole": (
            (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) != (1, 1)
        ),
        f"set {DRAFTER} to the folder of a saved drafter": not os.environ.get(DRAFTER),
    }
    for problem, holds in problems.items():
        if holds:
            raise ValueError(f"FalconLabProposer: {problem}")
