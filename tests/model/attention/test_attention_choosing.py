"""Which attention a target gets, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.model.attention import choosing
from falcon_lab.model.attention.choosing import (
    AUTO,
    MERGING,
    SDPA,
    Timing,
    loading_attention,
    pick,
    use_backend,
)
from falcon_lab.model.attention.kernels import KERNELS
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.registration import backend_of
from falcon_lab.model.attention.torch_flash import TorchFlash
from falcon_lab.model.loading import load_target
from tiny_models import save_tiny, tiny_target, tiny_tokenizer


def timings(**seconds: Sequence[float]) -> list[Timing]:
    """Times at contexts 256, 1024, …"""
    return [
        Timing(name, 256 * 4**index, 32, each)
        for name, times in seconds.items()
        for index, each in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"sdpa": [1, 2, 4], "a": [3, 3, 3]}, ("a", 4096)),
        ({"sdpa": [1, 4, 4], "a": [3, 3, 3], "b": [2, 2, 2]}, ("b", 1024)),
        ({"sdpa": [4, 4, 4], "a": [3, 3, 3]}, ("a", 0)),
        ({"sdpa": [4, 1, 4], "a": [3, 3, 3]}, ("a", 4096)),
        ({"sdpa": [4, 4, 4], "a": [1, 1, 3.9]}, None),
        ({"sdpa": [1, 1, 1], "a": [3, 3, 3]}, None),
        ({"sdpa": [1, 1, 1]}, None),
    ],
)
def test_the_fastest_at_length_is_taken_from_where_it_pays(
    times: dict[str, list[float]], expected: tuple[str, int] | None
) -> None:
    assert pick(timings(**times)) == expected


def measured(monkeypatch: pytest.MonkeyPatch, **seconds: Sequence[float]) -> None:
    """Let the clock say this."""

    def said(backends: Mapping[str, Any], *_: Any, **__: Any) -> Iterator[Timing]:
        assert set(backends) | {SDPA} == set(seconds)
        yield from timings(**seconds)

    monkeypatch.setattr(choosing, "time_attention", said)


def test_auto_takes_what_was_fastest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, sdpa=[1e-3, 2e-3, 9e-3], torch_flash=[3e-3, 3e-3, 3e-3])
    target, said = tiny_target(), list[str]()
    use_backend(target, AUTO, said.append)
    assert backend_of(target.backbone.implementation) == Merged(TorchFlash(), 4096)
    assert said == [
        "target tiny-llama: attention torch_flash from 4096 tokens of context on (a tree of 32 "
        "nodes, ms a layer after 224 tokens: sdpa 1.000, 2.000, 9.000; "
        "torch_flash 3.000, 3.000, 3.000)"
    ]


def test_auto_keeps_sdpa_where_nothing_is_faster_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(monkeypatch, sdpa=[1e-3], torch_flash=[3e-3])
    target, said = tiny_target(), list[str]()
    use_backend(target, AUTO, said.append)
    assert target.backbone.implementation == SDPA
    assert said[0].startswith("target tiny-llama: attention sdpa (a tree of 32 nodes")


def test_auto_measures_the_target_s_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SECONDS", 1e-4)
    target, said = tiny_target(), list[str]()
    use_backend(target, AUTO, said.append)
    assert "after 224 tokens: sdpa 0." in said[0]  # its 256 positions hold no longer context
    assert "; torch_flash 0." in said[0]


def test_auto_says_when_there_is_nothing_to_compare() -> None:
    target, said = tiny_target(), list[str]()
    use_backend(target, AUTO, said.append, kernels=[])
    assert said == [
        "target tiny-llama: attention sdpa: no other supports heads of 8 numbers in float32 on cpu"
    ]


def test_a_kernel_that_is_asked_for_is_taken_at_every_context() -> None:
    target, said = tiny_target(), list[str]()
    use_backend(target, "torch_flash", said.append)
    assert backend_of(target.backbone.implementation) == Merged(TorchFlash())
    assert not said


def test_a_kernel_that_is_asked_for_and_cannot_run_is_an_error() -> None:
    with pytest.raises(FalconLabError, match=r"target.attention is flash_attn, which .* here: "):
        use_backend(tiny_target(), "flash_attn", print)


@dataclass(frozen=True)
class Unneeded(TorchFlash):
    """Must not be asked for anything but whether it could run."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a model that can take no backend was measured")


def test_layers_that_all_have_a_window_keep_sdpa_and_it_is_said_once() -> None:
    for asked in (AUTO, "torch_flash"):
        target, said = tiny_target("mistral"), list[str]()
        use_backend(target, asked, said.append, kernels=[Unneeded()])
        assert target.backbone.implementation == SDPA
        assert said == [
            "target tiny-mistral: attention sdpa: all its layers see a sliding window, which is "
            "written into a mask"
        ]


def test_a_window_in_some_layers_is_said_once() -> None:
    target, said = tiny_target("gemma3", layers=6), list[str]()
    use_backend(target, "torch_flash", said.append)
    assert backend_of(target.backbone.implementation) is not None
    assert said == ["target tiny-gemma3: its layers with a sliding window keep sdpa"]


def test_modules_that_take_no_attention_of_ours_are_named() -> None:
    target, said = tiny_target(), list[str]()
    target.model.set_attn_implementation = lambda name: None
    use_backend(target, "torch_flash", said.append)
    assert said == ["target tiny-llama: attention sdpa: the modules of llama take no other"]


def test_values_of_another_size_leave_nothing_to_merge() -> None:
    target, said = tiny_target(), list[str]()
    target.config.v_head_dim = 16
    use_backend(target, AUTO, said.append, kernels=[Unneeded()])
    assert "its values are of another size than its keys" in said[0]


@pytest.mark.parametrize("asked", MERGING)
def test_what_no_kernel_computes_is_loaded_with_eager_attention(asked: str) -> None:
    plain, capped = SimpleNamespace(), SimpleNamespace(attn_logit_softcapping=50.0)
    knows, sinks = SimpleNamespace(_supports_sdpa=True), SimpleNamespace(_supports_sdpa=False)
    assert loading_attention(asked, plain, knows) == (SDPA, None)
    assert loading_attention(asked, capped, knows) == ("eager", "it caps its attention scores")
    assert loading_attention(asked, plain, sinks)[0] == "eager"
    assert loading_attention("eager", plain, knows) == ("eager", None)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_fall_back_to_eager_attention(name: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    shared = sizes | heads | ends | {"max_position_embeddings": 64}
    if name == "gemma2":
        config: Any = transformers.Gemma2Config(**shared)
    else:
        config = transformers.GptOssConfig(**shared, num_local_experts=2, num_experts_per_tok=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    said: list[str] = []
    target = load_target(
        TargetConfig(name=str(tmp_path), device="cpu", attention=AUTO, dtype="float32"), said.append
    )
    assert target.backbone.implementation == "eager"
    assert len(said) == 1
    assert f"target {tmp_path}: attention eager: it" in said[0]


def test_a_target_is_loaded_with_the_backend_of_its_configuration(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = TargetConfig(name=str(tmp_path), device="cpu", lean=True)
    target = load_target(replace(config, attention="torch_flash"))
    assert backend_of(target.backbone.implementation) == Merged(TorchFlash())
    assert target.backbone.lean is not None
    with pytest.raises(FalconLabError, match=r"target\.attention is 'flash'; choose one of sdpa"):
        load_target(replace(config, attention="flash"))


def test_every_kernel_has_a_name_of_its_own() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS) == len(MERGING) - 1
