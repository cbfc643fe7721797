"""What only a CUDA device can show. Run with ``pytest -m gpu``; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.decoding import generate, plain, speculative
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.trees.templates import named
from tiny_models import FAMILIES, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(engine: Any, prompt: list[int], **settings: Any) -> list[int]:
    tokens: list[int] = engine.generate(
        torch.tensor(prompt, device="cuda"),
        max_new_tokens=24,
        generator=torch.Generator("cuda").manual_seed(0),
        **settings,
    ).tokens
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [1, 2, 3])
def test_greedy_speculation_is_lossless_on_the_gpu(family: str, block: int) -> None:
    from falcon_lab.decoding.plain import PlainEngine
    from falcon_lab.decoding.stopping import StopCondition
    from falcon_lab.sampling import Sampling

    target = tiny_target(family, vocab=12).to("cuda")
    drafter = FalconDrafter(FalconConfig(block=block), BuildContext(host=target)).eval().to("cuda")
    shared = {"sampling": Sampling(), "stop": StopCondition()}
    expected = on_gpu(PlainEngine(target), [3, 1, 4], **shared)
    engine = speculative(target, drafter, named("auto", block))
    assert on_gpu(engine, [3, 1, 4], **shared) == expected


def test_the_gpu_writes_what_the_cpu_writes() -> None:
    from falcon_lab.decoding.plain import PlainEngine
    from falcon_lab.decoding.stopping import StopCondition
    from falcon_lab.sampling import Sampling

    target = tiny_target("llama", vocab=12)
    expected = plain(target, [3, 1, 4], 24).tokens
    assert generate(PlainEngine(target), [3, 1, 4], 24).tokens == expected
    target.to("cuda")
    shared = {"sampling": Sampling(), "stop": StopCondition()}
    assert on_gpu(PlainEngine(target), [3, 1, 4], **shared) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
def test_a_batch_writes_what_each_prompt_gives_alone_on_the_gpu(family: str) -> None:
    from falcon_lab.decoding.plain import PlainEngine
    from falcon_lab.decoding.stopping import StopCondition
    from falcon_lab.sampling import Sampling

    target = tiny_target(family, vocab=12).to("cuda")
    drafter = FalconDrafter(FalconConfig(block=2), BuildContext(host=target)).eval().to("cuda")
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9], [7, 9]]
    shared = {"sampling": Sampling(), "stop": StopCondition({0})}
    expected = [on_gpu(PlainEngine(target), prompt, **shared) for prompt in prompts]
    for engine in (PlainEngine(target), speculative(target, drafter, named("auto", 2))):
        found = engine.generate_batch(
            [torch.tensor(prompt, device="cuda") for prompt in prompts],
            batch_size=3,
            max_new_tokens=24,
            generators=[torch.Generator("cuda") for _ in prompts],
            **shared,
        )
        assert [one.tokens for one in found] == expected
