"""What is read of configurations, where families call things by other names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.families import (
    FULL,
    SLIDING,
    UNBOUNDED,
    LayerSizes,
    decoder_of,
    layer_kinds,
    max_positions,
    short_config,
)
from falcon_lab.model.self_check import check_target
from tiny_models import tiny_config, tiny_model
from unusual_models import CONFIGURATIONS, unusual_config, unusual_target


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_every_unusual_family_can_be_a_target(family: str) -> None:
    check_target(unusual_target(family))


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_decoder_blocks_of_every_unusual_family_can_be_made(family: str) -> None:
    assert len(Backbone.short(unusual_target(family).config, 1).layout.layers) == 1


def test_a_window_as_long_as_the_text_is_none() -> None:
    assert layer_kinds(unusual_config("moshi")) == (FULL,)
    assert layer_kinds(unusual_config("moshi", sliding_window=6)) == (SLIDING,)


def test_a_window_that_only_hugging_face_s_cache_knows_of_is_refused() -> None:
    with pytest.raises(FalconLabError, match=r"sliding_window of 6.*set it to the 256 positions"):
        check_target(unusual_target("moshi", sliding_window=6))


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "hybrid", "conv"])
def test_a_layer_with_a_state_is_refused_with_what_could_be_done(kind: str) -> None:
    config = SimpleNamespace(model_type="some", layer_types=[FULL, kind])
    with pytest.raises(FalconLabError, match=rf"recurrent state.*{kind}.*a chain could be"):
        layer_kinds(config)


def test_layers_of_several_sizes_give_those_of_full_attention() -> None:
    config = unusual_config("gemma4")
    assert LayerSizes.of(config).head == 16
    assert short_config(config, 1).head_dim == 16


def test_layer_sizes_have_their_family_s_names() -> None:
    assert LayerSizes.of(tiny_config("gpt2")) == (32, 128, 4, 4, 8)
    assert LayerSizes.of(tiny_config("qwen3")) == (32, 64, 4, 2, 8)


def test_linear_biases_have_positions_without_end() -> None:
    config = unusual_config("bloom")
    del config.max_position_embeddings
    assert max_positions(config) == UNBOUNDED


def test_a_configuration_without_positions_is_refused_with_the_key_to_add() -> None:
    with pytest.raises(FalconLabError, match="add max_position_embeddings"):
        max_positions(SimpleNamespace(model_type="some"))


def test_the_decoder_is_no_part_of_another_kind_that_has_its_name() -> None:
    model: Any = tiny_model("llama")
    model.decoder = model.lm_head
    assert decoder_of(model) is model.model


def test_what_cannot_be_made_is_refused_with_the_reason_and_other_drafters() -> None:
    config = tiny_config("llama")
    config.hidden_act = "no_such_activation"
    with pytest.raises(FalconLabError, match=r"decoder blocks.*\(llama\).*no_such_.*medusa"):
        Backbone.short(config, 1)
