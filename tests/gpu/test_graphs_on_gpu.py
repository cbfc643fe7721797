"""CUDA graphs, captured and replayed. Run with ``pytest -m gpu``; skipped without a device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from everything import everything
from fakes.decoding import chain, speculative
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.assembling import choose_drafter
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.attention.choosing import use_backend
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.recording import CudaRecorder
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.templates import named
from graph_cases import graphed, text
from tiny_models import FAMILIES, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def cuda() -> torch.device:
    return torch.device("cuda")


def falcon(target: Target, block: int) -> FalconDrafter:
    torch.manual_seed(3)
    return FalconDrafter(FalconConfig(block=block), BuildContext(host=target)).eval().to("cuda")


def write(engine: Any, prompt: list[int], new: int, temperature: float = 0.0) -> Generation:
    out: Generation = engine.generate(
        torch.tensor(prompt, device="cuda"),
        max_new_tokens=new,
        sampling=Sampling(temperature),
        generator=torch.Generator("cuda").manual_seed(0),
        stop=StopCondition(),
    )
    return out


def test_a_replay_reads_what_its_inputs_hold_and_graphs_share_their_memory() -> None:
    recorder = CudaRecorder(cuda())
    given = torch.arange(1000.0, device="cuda")
    runs = [
        recorder.capture(lambda factor=factor: ((given * factor).sin().cumsum(0),))
        for factor in (1.0, 2.0, 3.0)
    ]
    for start in (5.0, -2.0):
        given.copy_(torch.arange(1000.0) + start)
        for factor, run in zip((1.0, 2.0, 3.0), runs, strict=True):
            [out] = run()
            assert torch.equal(out, (given * factor).sin().cumsum(0))


def test_what_waits_for_the_host_is_refused_and_harms_nothing() -> None:
    recorder, given = CudaRecorder(cuda()), torch.ones(8, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder.capture(lambda: (given * int(given.sum()),))
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    [out] = recorder.capture(lambda: (given + 1,))()
    assert out.tolist() == [2.0] * 8


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_are_the_plain_ones(family: str, lean: bool) -> None:
    said: list[str] = []
    target = tiny_target(family).to("cuda")
    target.backbone = Backbone(target.model.get_decoder(), lean=lean)
    with_graphs = graphed(target, CudaRecorder(cuda()), said)
    for prompt, seed in ((5, 0), (33, 1), (70, 3), (20, 4)):
        plain = text(target, prompt, seed)
        assert torch.allclose(text(with_graphs, prompt, seed), plain, atol=1e-3)
    assert said == []


@pytest.mark.parametrize("attention", ["sdpa", "torch_flash"])
def test_in_half_precision_too(attention: str) -> None:
    said: list[str] = []
    target = tiny_target("llama", hidden=64)
    target.model.to(torch.bfloat16)
    target.backbone = Backbone(target.model.get_decoder(), lean=True)
    target.to("cuda")
    if attention != "sdpa":
        use_backend(target, attention, print)
    plain = text(target, 60).float()
    ours = text(graphed(target, CudaRecorder(cuda()), said), 60).float()
    assert (ours - plain).abs().max() <= 0.1 * plain.abs().max()
    assert said == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("block", [1, 2])
def test_greedy_speculation_through_graphs_is_lossless(family: str, block: int) -> None:
    said: list[str] = []
    target = tiny_target(family, vocab=12).to("cuda")
    fast = target.compiled(said.append)
    drafter = falcon(target, block).compiled(said.append)
    for tree in (chain(2 * block), named("vicuna", block)):
        for prompt, new in (([3, 1, 4, 1, 5], 40), ([5] * 150, 30), ([2], 20)):
            expected = write(PlainEngine(target), prompt, new).tokens
            assert write(PlainEngine(fast), prompt, new).tokens == expected
            assert write(speculative(fast, drafter, tree), prompt, new).tokens == expected
    assert said == []


@pytest.mark.parametrize("name", ["eagle", "eagle3", "sps", "medusa", "dflash"])
def test_the_drafters_of_plug_ins_are_lossless_through_graphs(name: str) -> None:
    said: list[str] = []
    target = tiny_target("llama", vocab=12).to("cuda")
    made = everything().build("drafter", {"name": name}, BuildContext(host=target)).eval()
    drafter = choose_drafter(made.to("cuda"), DecodingConfig(compile="drafter"), said.append)
    assert drafter.is_compiled
    for prompt, new in (([3, 1, 4, 1, 5], 40), ([5] * 150, 30), ([2], 20)):
        expected = write(PlainEngine(target), prompt, new).tokens
        engine = speculative(target, drafter, chain(max(3, made.block)))
        assert write(engine, prompt, new).tokens == expected
    assert said == []


def test_a_greedy_round_waits_once() -> None:
    target = tiny_target().to("cuda")
    drafter = falcon(target, 2).compiled(print)
    engine = speculative(target.compiled(print), drafter, named("k2-8", 2))
    write(engine, [3, 1, 4, 1, 5], 40)  # captures, and makes the trees of the last rounds
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            out = write(engine, [3, 1, 4, 1, 5], 40)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    # The prompt comes from the host, and the first token and the clock are waited for.
    assert len(waits) <= len(out.rounds) + 4


def test_the_parts_of_the_time_add_up_without_waiting_for_them() -> None:
    target = tiny_target().to("cuda")
    seconds = write(speculative(target, falcon(target, 2), chain(4)), [3, 1, 4], 24).seconds
    parts = (seconds.draft, seconds.verify, seconds.accept, seconds.commit, seconds.overhead)
    assert all(part > 0 for part in (seconds.draft, seconds.verify, seconds.prefill))
    assert seconds.total == pytest.approx(sum(parts))
