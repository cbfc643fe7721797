"""llama.cpp as a method, on a module in its place."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from fakes.llama_cpp import fake_llama_cpp
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.llama_generate import LlamaGenerate
from falcon_lab.sampling import Sampling
from tiny_models import POSITIONS, tiny_target

PROMPT = [5, 9, 13, 21, 8]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama")


@pytest.fixture
def module(target: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake_llama_cpp(target.model)
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def generate(engine: Any, prompt: list[int] = PROMPT, new: int = 12, **changes: Any) -> Generation:
    arguments = {"sampling": Sampling(), "stop": StopCondition(), **changes}
    draws = torch.Generator().manual_seed(2**40)
    ids = torch.tensor(prompt)
    return engine.generate(ids, max_new_tokens=new, generator=draws, **arguments)


def test_a_text_ends_where_plain_decoding_ends_it(target: Any, module: Any) -> None:
    ours, theirs = PlainEngine(target), LlamaGenerate(target, "a.gguf", 3)
    long = [7] * (POSITIONS - 4)
    for prompt, end in ((PROMPT, None), (PROMPT, generate(ours).tokens[5]), (long, None)):
        stop = StopCondition(() if end is None else {end})
        expected = generate(ours, prompt, stop=stop)
        found = generate(theirs, prompt, stop=stop)
        assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
        assert found.rounds == []
    assert generate(theirs, long).finish == "context"


def test_every_prompt_is_read_whole_by_as_many_threads(target: Any, module: Any) -> None:
    engine = LlamaGenerate(target, "a.gguf", 3)
    for prompt in (PROMPT, PROMPT, [*PROMPT, 4]):
        generate(engine, prompt)
    [model] = module.Llama.made
    assert model.read == [5, 5, 6]
    assert model.arguments["model_path"] == "a.gguf"
    assert model.arguments["n_threads"] == model.arguments["n_threads_batch"] == 3
    assert model.arguments["n_gpu_layers"] == 0


def test_a_longer_text_has_a_larger_context(target: Any, module: Any) -> None:
    engine = LlamaGenerate(target, "a.gguf", 1)
    engine.target = tiny_target("llama", layers=1)
    engine.target.max_positions = 10**4
    for new in (1, 2, 1100, 3):
        generate(engine, PROMPT * new, new=2)
    lengths = [model.arguments["n_ctx"] for model in module.Llama.made]
    assert len(lengths) == 2
    assert lengths[1] > 5 * 1100 + 2


def test_where_it_is_not_installed_the_command_is_named(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(FalconLabError, match="pip install llama-cpp-python"):
        generate(LlamaGenerate(target, "a.gguf", 1))
