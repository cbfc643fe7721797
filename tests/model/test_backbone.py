"""Fresh decoder blocks of every family, and the masks that layers of different kinds get."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.families import layer_kinds
from falcon_lab.model.masks import causal_mask
from falcon_lab.tree import ancestor_matrix
from tiny_models import FAMILIES, WINDOW, tiny_config, tiny_model

HIDDEN = 32
ATOL = 1e-5

every_family = pytest.mark.parametrize("family", FAMILIES)
every_kernel = pytest.mark.parametrize("attention", ["sdpa", "eager"])


@cache
def short(family: str, attention: str = "sdpa") -> Backbone:
    config = tiny_config(family, layers=3)
    config._attn_implementation = attention
    torch.manual_seed(0)
    backbone = Backbone.short(config, layers=2).eval()
    for parameter in backbone.parameters():  # larger weights, so that attention matters
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return backbone


def states(count: int, seed: int = 0) -> Tensor:
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def causal(backbone: Backbone, embeddings: Tensor) -> Tensor:
    new = embeddings.shape[1]
    mask = causal_mask(new, 0, embeddings.device)
    return backbone(embeddings=embeddings, positions=torch.arange(new)[None], mask=mask)


@every_family
def test_short_has_the_asked_layers_and_no_table_of_embeddings(family: str) -> None:
    backbone = Backbone.short(tiny_config(family, layers=3), layers=1)
    names = list(backbone.state_dict())
    assert not [n for n in names if any(t in n for t in ("embed_tokens", "embed_in", "wte"))]
    numbered = {part for name in names for part in name.split(".") if part.isdigit()}
    assert numbered == {"0"}
    assert causal(backbone, states(4)).shape == (1, 4, HIDDEN)


@every_family
def test_short_leaves_no_parameter_without_a_gradient(family: str) -> None:
    backbone = Backbone.short(tiny_config(family), layers=2)
    causal(backbone, states(5)).square().sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []
    assert all(p.requires_grad and p.dtype == torch.float32 for p in backbone.parameters())


@every_family
def test_short_leaves_the_configuration_as_it_is(family: str) -> None:
    config = tiny_model(family).config
    before = copy.deepcopy(config.to_dict())
    Backbone.short(config, layers=1)
    assert config.to_dict() == before


@every_family
def test_every_layer_of_short_sees_beyond_the_window(family: str) -> None:
    backbone = Backbone.short(tiny_config(family), layers=1)
    embeddings = states(2 * WINDOW).requires_grad_()
    causal(backbone, embeddings)[0, -1].square().sum().backward()
    assert embeddings.grad is not None
    assert embeddings.grad[0, 0].abs().sum() > 0


@every_family
@every_kernel
def test_short_with_a_cache_and_a_tree_equals_its_paths_alone(family: str, attention: str) -> None:
    backbone, prefix = short(family, attention), states(7)
    parents = torch.tensor([-1, 0, 0, 1, 2])
    depth = torch.tensor([0, 1, 1, 2, 2])
    nodes, ancestors = states(5, seed=1), ancestor_matrix(parents)
    with torch.no_grad():
        kv = backbone.new_cache(16)
        for part, start in ((prefix[:, :4], 0), (prefix[:, 4:], 4)):
            positions = torch.arange(start, start + part.shape[1])[None]
            mask = causal_mask(part.shape[1], start, part.device)
            hidden = backbone(embeddings=part, positions=positions, mask=mask, cache=kv)
        torch.testing.assert_close(hidden, causal(backbone, prefix)[:, 4:], atol=ATOL, rtol=0)
        tree = backbone(
            embeddings=nodes, positions=(7 + depth)[None], mask=ancestors[None], cache=kv
        )
        for node in range(5):
            path = ancestors[node].nonzero()[:, 0]
            alone = causal(backbone, torch.cat([prefix, nodes[:, path]], dim=1))
            torch.testing.assert_close(tree[0, node], alone[0, -1], atol=ATOL, rtol=0)

        kv.commit([7], [[0, 2, 4]])
        newest = states(1, seed=2)
        step = backbone(embeddings=newest, positions=torch.tensor([[10]]), mask=None, cache=kv)
        kept = torch.cat([prefix, nodes[:, [0, 2, 4]], newest], dim=1)
        torch.testing.assert_close(step[0, 0], causal(backbone, kept)[0, -1], atol=ATOL, rtol=0)


@every_kernel
def test_no_mask_lets_every_row_see_every_key(attention: str) -> None:
    backbone, embeddings = short("llama", attention), states(3)
    positions = torch.arange(3)[None]
    everything = torch.ones(1, 3, 3, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(
            backbone(embeddings=embeddings, positions=positions, mask=None),
            backbone(embeddings=embeddings, positions=positions, mask=everything),
            atol=ATOL,
            rtol=0,
        )


def test_single_steps_without_a_mask_equal_one_causal_pass() -> None:
    backbone = Backbone(tiny_model("llama").model)
    tokens = torch.randint(2, 64, (1, 6), generator=torch.Generator().manual_seed(0))
    rows = []
    with torch.no_grad():
        kv = backbone.new_cache(6)
        for i in range(6):
            step = backbone(
                tokens=tokens[:, i : i + 1], positions=torch.tensor([[i]]), mask=None, cache=kv
            )
            rows.append(step[0, 0])
        expected = backbone(
            tokens=tokens,
            positions=torch.arange(6)[None],
            mask=causal_mask(6, 0, tokens.device),
        )
    torch.testing.assert_close(torch.stack(rows), expected[0], atol=ATOL, rtol=0)


def test_a_batch_equals_its_rows_one_by_one_with_masks_of_their_own() -> None:
    backbone, embeddings = short("gemma3"), torch.cat([states(6), states(6, seed=1)])
    mask = torch.cat([causal_mask(6, 0, embeddings.device), torch.eye(6, dtype=torch.bool)[None]])
    positions = torch.stack([torch.arange(6), torch.arange(6).flip(0)])
    with torch.no_grad():
        both = backbone(embeddings=embeddings, positions=positions, mask=mask)
        for b in range(2):
            row = slice(b, b + 1)
            alone = backbone(embeddings=embeddings[row], positions=positions[row], mask=mask[row])
            torch.testing.assert_close(both[row], alone, atol=ATOL, rtol=0)


def test_the_kinds_of_layers_are_read_from_every_sort_of_configuration() -> None:
    assert layer_kinds(tiny_config("llama")) == ("full_attention",)
    assert layer_kinds(tiny_config("mistral")) == ("sliding_attention",)
    assert layer_kinds(tiny_config("gemma3")) == ("full_attention", "sliding_attention")


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(model_type="x", layer_types=["full_attention", "linear_attention"]),
        SimpleNamespace(model_type="x", layer_types=["chunked_attention"]),
        SimpleNamespace(model_type="x", attention_layers=["global", "local"]),
        SimpleNamespace(model_type="x", layers_block_type=["attention", "mamba"]),
    ],
)
def test_layers_that_no_tree_mask_can_express_are_refused(config: SimpleNamespace) -> None:
    with pytest.raises(
        FalconLabError, match=r"\b(linear_attention|chunked_attention|local|mamba)\b.*: a tree"
    ):
        layer_kinds(config)
