"""Hugging Face's ways to decode write what plain decoding writes, on a tiny random model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.sampling import Sampling
from falcon_lab.studies.bench import HF, HF_ASSISTED, HF_LOOKUP, HF_STATIC, METHODS
from falcon_lab.studies.bench.loops import hf_modes
from tiny_models import tiny_target

THEIRS = [HF, HF_STATIC, HF_ASSISTED, HF_LOOKUP]
PROMPT = torch.tensor([5, 9, 13, 21, 8, 5, 9])


def write(engine: Any, stop: StopCondition, tokens: int = 24) -> tuple[list[int], str]:
    out = engine.generate(
        PROMPT,
        max_new_tokens=tokens,
        sampling=Sampling(),
        generator=torch.Generator().manual_seed(3),
        stop=stop,
    )
    return out.tokens, out.finish


def attempt(engine: Any) -> None:
    write(engine, StopCondition(), 4)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


@pytest.fixture(scope="module")
def modes(target: Any) -> dict[str, Any]:
    found, left_out = hf_modes(target, METHODS, tiny_target(layers=1), attempt=attempt)
    assert left_out == {}
    return found


@pytest.mark.parametrize("method", THEIRS)
@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_the_tokens_are_plain_decodings(
    method: str, tokens: int, target: Any, modes: dict[str, Any]
) -> None:
    expected = write(PlainEngine(target), StopCondition(), tokens)
    assert write(modes[METHODS[method]], StopCondition(), tokens) == expected


@pytest.mark.parametrize("method", THEIRS)
def test_the_same_token_ends_the_text(method: str, target: Any, modes: dict[str, Any]) -> None:
    full, _ = write(PlainEngine(target), StopCondition())
    stop = StopCondition({full[5]})
    expected = write(PlainEngine(target), stop)
    assert expected[1] == "eos"
    assert write(modes[METHODS[method]], stop) == expected


def test_each_method_is_the_mode_that_it_says(modes: dict[str, Any]) -> None:
    settings = {name: (engine.settings, list(engine.arguments)) for name, engine in modes.items()}
    assert settings == {
        "HF generate": ({}, []),
        "HF static cache": ({"cache_implementation": "static"}, []),
        "HF assisted": ({}, ["assistant_model"]),
        "HF prompt lookup": ({"prompt_lookup_num_tokens": 10}, []),
    }


def test_only_what_was_asked_for_is_there(target: Any) -> None:
    found, left_out = hf_modes(target, [HF_LOOKUP, "plain"], attempt=attempt)
    assert (list(found), left_out) == (["HF prompt lookup"], {})


def test_without_an_assistant_assisted_generation_is_left_out(target: Any) -> None:
    found, left_out = hf_modes(target, [HF, HF_ASSISTED], attempt=attempt)
    assert list(found) == ["HF generate"]
    assert left_out == {"HF assisted": "no assistant was named"}


def test_a_mode_that_a_model_cannot_do_is_left_out_with_the_reason(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = target.model.generate

    def generate(*arguments: Any, generation_config: Any, **options: Any) -> Any:
        if generation_config.cache_implementation == "static":
            raise ValueError("no static\ncache for this one")
        return real(*arguments, generation_config=generation_config, **options)

    monkeypatch.setattr(target.model, "generate", generate)
    found, left_out = hf_modes(target, [HF, HF_STATIC], attempt=attempt)
    assert list(found) == ["HF generate"]
    assert left_out == {"HF static cache": "ValueError: no static cache for this one"}


def test_an_assistant_with_another_vocabulary_is_refused(target: Any) -> None:
    with pytest.raises(FalconLabError, match="assistant tiny-llama has another vocabulary"):
        hf_modes(target, [HF_ASSISTED], tiny_target(vocab=48), attempt=attempt)
