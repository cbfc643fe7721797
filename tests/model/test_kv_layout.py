"""Memory that is counted, against memory that is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.kv_layout import KVLayout, LayerKV
from falcon_lab.model.target import Target
from tiny_models import FAMILIES, tiny_model, tiny_target, tiny_tokenizer

CAPACITY = 19
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def taken(cache: KVCache) -> int:
    """Bytes of all storages behind a cache, each counted once."""
    tensors = [rows for pair in cache._states if pair for rows in pair]
    tensors += [cache.positions] if cache.positions is not None else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def read(target: Target) -> KVCache:
    cache = target.new_cache(CAPACITY)
    target.prefill(torch.arange(1, 9), cache)
    return cache


def sharing_layers() -> Any:
    """Gemma 3n: the last layers read the keys and values of earlier ones."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **SHAPE,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Gemma3nForCausalLM(config)


def unequal_heads() -> Any:
    """DeepSeek V3: keys and values are of different widths (or a latent stands for both)."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **SHAPE,
        num_hidden_layers=2,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=2,
        pad_token_id=0,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_taken_is_what_was_counted(family: str) -> None:
    target = tiny_target(family)
    counted = target.kv_bytes(CAPACITY)
    cache = read(target)
    assert counted == taken(cache) == cache.nbytes > 0


@pytest.mark.parametrize(("family", "heads"), [("gpt2", 4), ("llama", 2), ("qwen3", 2)])
def test_it_is_layers_heads_and_head_size_times_two(family: str, heads: int) -> None:
    assert tiny_target(family).kv_bytes(CAPACITY) == 2 * 2 * heads * 8 * CAPACITY * 4


def test_a_sliding_window_s_positions_are_counted() -> None:
    target = tiny_target("gemma3")
    assert target.kv_bytes(CAPACITY) == (2 * 2 * 2 * 8 * 4 + 8) * CAPACITY


def test_layers_that_read_another_one_s_rows_take_no_memory() -> None:
    target = Target(sharing_layers(), tiny_tokenizer(), name="gemma3n")
    assert [rows is None for rows in target.backbone.layout.layers] == [False, False, True, True]
    assert target.kv_bytes(CAPACITY) == taken(read(target)) == (2 * 2 * 2 * 8 * 4 + 8) * CAPACITY


def test_keys_and_values_of_different_widths_are_counted_as_they_are() -> None:
    target = Target(unequal_heads(), tiny_tokenizer(), name="deepseek")
    rows = target.backbone.layout.layers[0]
    assert rows is not None
    assert rows.key != rows.value
    assert target.kv_bytes(CAPACITY) == taken(read(target)) == 2 * rows.bytes * CAPACITY


def test_layers_of_different_shapes_take_no_more_than_their_own() -> None:
    narrow, wide = (LayerKV((heads, 4), (heads, 4), torch.float32) for heads in (2, 5))
    layout = KVLayout((narrow, wide, narrow))
    cache = KVCache(3, CAPACITY, layout)
    for layer, rows in enumerate((narrow, wide, narrow)):
        states = torch.randn(1, rows.key[0], 3, 4)
        keys, values = cache.update(states, -states, layer)
        assert torch.equal(keys, states)
        assert torch.equal(values, -states)
    assert taken(cache) == cache.nbytes == layout.bytes(CAPACITY) == (4 + 10 + 4) * 4 * 4 * CAPACITY
    cache.commit([0], [[0, 2]])
    for rows in cache._states:
        assert rows is not None
        assert torch.equal(rows[0][:, :, :2], -rows[1][:, :, :2])


def test_several_sequences_take_several_times_as_much() -> None:
    layout = tiny_target().backbone.layout
    assert layout.bytes(CAPACITY, batch=3) == 3 * layout.bytes(CAPACITY)


def test_another_precision_is_counted_anew() -> None:
    model = tiny_model("llama")
    target = Target(model, tiny_tokenizer(), name="llama")
    before = target.kv_bytes(CAPACITY)
    model.to(torch.bfloat16)
    assert target.kv_bytes(CAPACITY) == before // 2 == taken(read(target))


def test_the_layout_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    target.new_cache(CAPACITY)
    monkeypatch.setattr(target.backbone, "forward", None)
    assert target.new_cache(CAPACITY).layout == target.backbone.layout


def test_short_models_without_a_vocabulary_have_a_layout_too() -> None:
    config = tiny_target().config
    layout = Backbone.short(config, 3).layout
    assert layout.per_position == 3 * 2 * 2 * 8 * 4
