"""Fresh draft models of families whose heads have sizes apart from the width's."""

from __future__ import annotations

import pytest
import torch
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.small_model import fresh_config, small_model

from unusual_models import CONFIGURATIONS, unusual_target

SHAPES = {"as_the_target": {}, "narrower": {"hidden": 16, "heads": 2}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_a_fresh_model_of_every_unusual_family_computes_logits(family: str, shape: str) -> None:
    target = unusual_target(family)
    made = small_model(SpsConfig(layers=1, **SHAPES[shape]), target)
    positions = torch.arange(5)[None]
    logits = made.logits(made(tokens=positions, positions=positions, mask=None))
    assert logits.shape == (1, 5, target.vocab_size)


def test_a_latent_attention_keeps_its_rotary_sizes() -> None:
    made = fresh_config(SpsConfig(hidden=64, heads=2), unusual_target("deepseek_v3"))
    assert (made.qk_rope_head_dim, made.head_dim, made.num_key_value_heads) == (8, 8, 2)
