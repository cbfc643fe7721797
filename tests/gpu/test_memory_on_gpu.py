"""Memory of a CUDA device, counted and taken. Run with ``pytest -m gpu``; skipped without one."""

from __future__ import annotations

import pytest
import torch

from fakes.decoding import chain, speculative
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.memory import free_memory
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.sampling import Sampling
from tiny_models import tiny_config, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_cache_takes_of_the_device_what_was_counted() -> None:
    target = _target(4096)
    target.new_cache(1)  # the layout is known from here on
    before = torch.cuda.memory_allocated()
    cache = target.new_cache(4096)
    target.prefill(torch.ones(1, dtype=torch.long, device="cuda"), cache)
    grown = torch.cuda.memory_allocated() - before
    assert target.kv_bytes(4096) == cache.nbytes <= grown < cache.nbytes + 2**21


def test_a_text_beyond_the_device_s_memory_is_refused_and_not_tried() -> None:
    target = _target(2**40)
    drafter = FalconDrafter(FalconConfig(block=2), BuildContext(target)).eval().to("cuda")
    engine = speculative(target, drafter, chain(4))
    free = free_memory(torch.device("cuda"))
    assert free is not None
    before = torch.cuda.memory_allocated()
    with pytest.raises(FalconLabError, match=r"are free on cuda.*at most \d+ tokens fit"):
        engine.generate(
            torch.ones(8, dtype=torch.long, device="cuda"),
            max_new_tokens=free,
            sampling=Sampling(),
            generator=torch.Generator("cuda").manual_seed(0),
            stop=StopCondition(),
        )
    assert torch.cuda.memory_allocated() - before < 2**21


def _target(positions: int) -> Target:
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config.max_position_embeddings = positions
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(config).to("cuda"), tiny_tokenizer(), name="tiny")
