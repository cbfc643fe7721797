"""SGLang's side (0.5.23): an algorithm for its registry, and the worker behind it.

SGLang loads ``register`` by the entry-point group ``sglang.srt.plugins``. It treats the algorithm
as it treats its own NGRAM: trees from outside, verified and sampled by SGLang, without a draft
model in its memory. What is different here is where trees come from, and that the features of all
positions are kept, for which the server is started with ``--enable-return-hidden-states``.

Run inside 0.5.23 on a CPU (``benchmarks/interop``) and tested against stand-ins of its interfaces;
never run on a GPU.
"""

from __future__ import annotations

import os
from typing import Any

from falcon_lab_serving.names import DRAFTER, tree_node

NAME = "FALCON_LAB"
"""Of ``--speculative-algorithm``."""

NODES = 8
"""Of a tree, the root among them, unless ``--speculative-num-draft-tokens`` says another number."""

REQUESTS = 48
"""At the same time, unless ``--max-running-requests`` says another number."""

NEEDED = {
    "enable_return_hidden_states": "--enable-return-hidden-states, as drafters read features",
    "disable_radix_cache": "--disable-radix-cache, as cached prompts have no features",
    "disable_overlap_schedule": "--disable-overlap-schedule, as a tree begins at the newest token",
}
"""Argument that must be true -> what to add, and why."""

ALONE = ("tp_size", "pp_size", "dp_size")
"""Arguments that must be 1: tables of the target are taken whole."""


def register() -> None:
    """Make the algorithm known to SGLang."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class FalconLabAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
        """NGRAM to the scheduler: what the registry's own class does not say, NGRAM says."""

        def __getattr__(self, name: str) -> Any:
            return getattr(SpeculativeAlgorithm.NGRAM, name)

        def is_ngram(self) -> bool:
            """Return True: trees come from outside, and the draft phase has no KV pool."""
            return True

        def has_draft_kv(self) -> bool:
            """Return False."""
            return False

        def handle_server_args(self, server_args: Any) -> None:
            """Fill in what the user left open."""
            fill_arguments(server_args)

    named = SpeculativeAlgorithm.register(
        NAME, validate_server_args=check_arguments, spec_class=FalconLabAlgorithm
    )
    named(worker_class)


def check_arguments(server_args: Any) -> None:
    """Refuse to start a server that cannot serve a drafter.

    Raises:
        ValueError: naming the argument or the variable, as SGLang's own checks do.
    """
    for name, advice in NEEDED.items():
        if not getattr(server_args, name):
            raise ValueError(f"{NAME}: start the server with {advice}")
    for name in ALONE:
        if getattr(server_args, name) != 1:
            raise ValueError(f"{NAME}: {name} is {getattr(server_args, name)}, and must be 1")
    if not os.environ.get(DRAFTER):
        raise ValueError(f"{NAME}: set {DRAFTER} to the folder of a saved drafter")
    tree_node(NODES)


def fill_arguments(server_args: Any) -> None:
    """Give arguments that the user left open the values that NGRAM's scheduling wants."""
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = NODES
    if server_args.max_running_requests is None:
        server_args.max_running_requests = REQUESTS
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
    server_args.enable_mixed_chunk = False


def worker_class(server_args: Any) -> type[Any]:
    """Return the class of the worker that the scheduler makes."""
    from falcon_lab_serving.sglang_worker import FalconLabWorker

    return FalconLabWorker
