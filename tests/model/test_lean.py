"""The short way through Llama-like layers equals the modules' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falcon_lab.model.backbone import Backbone
from falcon_lab.model.lean import FAMILIES as LEAN
from falcon_lab.model.lean import supports
from falcon_lab.model.masks import causal_mask
from falcon_lab.tree import ancestor_matrix
from tiny_models import FAMILIES, tiny_config, tiny_model

ATOL = 2e-5

lean_families = pytest.mark.parametrize("family", sorted(LEAN))


def _base(family: str = "llama", **shape: int) -> Any:
    return tiny_model(family, layers=3, **shape).get_decoder()


def _random(config: Any) -> Any:
    """A base model of a configuration, every weight far from its start, so that it matters."""
    from transformers import AutoModel

    torch.manual_seed(0)
    base = AutoModel.from_config(config, dtype=torch.float32).eval()
    for name, parameter in base.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return base


def _check(base: Any) -> None:
    lean = Backbone(base, lean=True)
    assert lean.lean is not None
    assert torch.allclose(_decode(lean), _decode(Backbone(base)), atol=ATOL)


def _decode(backbone: Backbone, batch: int = 1) -> Tensor:
    """A prefill, a tree, a commit of one of its paths, a step, and a block that all see."""
    drawn = torch.Generator().manual_seed(batch)
    tokens = torch.randint(1, 60, (batch, 24), generator=drawn)
    parents = torch.tensor([-1, 0, 0, 2, 1])
    depth = torch.tensor([0, 1, 1, 2, 2])
    cache = backbone.new_cache(40)
    with torch.inference_mode():
        mask = causal_mask(12, 0, tokens.device)
        read = backbone(
            tokens=tokens[:, :12], positions=torch.arange(12)[None], mask=mask, cache=cache
        )
        tree = backbone(
            tokens=tokens[:, 12:17],
            positions=(12 + depth)[None],
            mask=ancestor_matrix(parents)[None],
            cache=cache,
        )
        cache.commit([12], [[0, 2, 3]])
        step = backbone(
            tokens=tokens[:, 17:18], positions=torch.tensor([[15]]), mask=None, cache=cache
        )
        block = backbone(
            tokens=tokens[:, 18:21], positions=torch.arange(16, 19)[None], mask=None, cache=cache
        )
    return torch.cat([read, tree, step, block], dim=1)


@lean_families
@pytest.mark.parametrize("batch", [1, 3])
def test_reading_verifying_and_stepping_equal_the_modules(family: str, batch: int) -> None:
    base = _base(family)
    lean = Backbone(base, lean=True)
    assert lean.lean is not None
    expected = _decode(Backbone(base), batch)
    assert torch.allclose(_decode(lean, batch), expected, atol=ATOL)
    assert expected.abs().max() > 0.5


def test_biases_of_every_projection_count() -> None:
    config = tiny_config("llama", layers=2)
    config.attention_bias = config.mlp_bias = True
    _check(_random(config))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_scaled_rotary_embeddings_are_the_model_s(rope: dict[str, Any]) -> None:
    config = tiny_config("llama", layers=2)
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    _check(_random(config))


def test_layers_of_both_kinds_see_through_masks_of_their_own() -> None:
    config = tiny_config("qwen2", layers=2)
    config.sliding_window, config.use_sliding_window = 4, True
    config.layer_types = ["full_attention", "sliding_attention"]
    _check(_random(config))


def test_weights_that_change_or_move_are_seen() -> None:
    base = _base()
    lean = Backbone(base, lean=True)
    before = _decode(lean)
    lean.load_state_dict({k: 1.1 * v for k, v in lean.state_dict().items()})
    changed = _decode(lean)
    assert not torch.allclose(changed, before, atol=1e-3)
    assert torch.allclose(changed, _decode(Backbone(base)), atol=ATOL)
    assert _decode(lean.double()).dtype == torch.float64
    assert torch.allclose(_decode(lean).float(), changed, atol=1e-4)


def test_a_deep_copy_goes_its_own_way() -> None:
    lean = Backbone(_base(), lean=True)
    twin = copy.deepcopy(lean)
    before = _decode(lean)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.2)
    assert torch.equal(_decode(lean), before)
    assert not torch.allclose(_decode(twin), before, atol=1e-3)


def test_gradients_and_passes_without_a_cache_go_through_the_modules() -> None:
    base = _base()
    lean = Backbone(base, lean=True)
    cache = lean.new_cache(8)  # which looks at one row first
    lean.lean = None if lean.lean is None else _refuse  # type: ignore[assignment]
    tokens, positions = torch.arange(1, 7)[None], torch.arange(6)[None]
    mask = causal_mask(6, 0, tokens.device)
    with torch.no_grad():
        lean(tokens=tokens, positions=positions, mask=mask)
    out = lean(tokens=tokens, positions=positions, mask=mask, cache=cache)
    assert out.requires_grad


def _refuse(*_: object) -> Tensor:
    raise AssertionError("the short way was taken")


def test_other_families_kernels_and_modified_modules_are_left_to_the_modules() -> None:
    for family in set(FAMILIES) - LEAN:
        assert not supports(_base(family)), family
    eager = _base()
    eager.config._attn_implementation = "eager"
    assert not supports(eager)

    class Adapted(nn.Linear):
        pass

    adapted = _base()
    adapted.layers[1].mlp.up_proj = Adapted(32, 64)
    assert not supports(adapted)

    hooked = _base()
    hooked.layers[0].self_attn.register_forward_pre_hook(lambda *_: None)
    assert not supports(hooked)

    dynamic = _base()
    dynamic.rotary_emb.rope_type = "dynamic"
    assert not supports(dynamic)
    assert supports(_base())
