"""Attention tile by tile: equal to the whole, in values and gradients, and blind to masked keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

from falcon_lab.model.attention.backend import masked_attention
from falcon_lab.model.attention.block_sparse import (
    TILE,
    block_sparse_attention,
    is_worthwhile,
)
from falcon_lab.model.attention.registration import BLOCK_SPARSE
from falcon_lab.model.backbone import Backbone, fresh_attention
from falcon_lab.model.masks import packed_mask
from tiny_models import FAMILIES, tiny_model

HEADS, GROUPS, SIZE = 4, 2, 8


def states(queries: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (HEADS, queries), (GROUPS, keys), (GROUPS, keys)
    made = (torch.randn(2, *shape, SIZE, generator=draw, dtype=torch.float64) for shape in shapes)
    query, key, value = (one.requires_grad_() for one in made)
    return query, key, value


def random_mask(queries: int, keys: int, share: float, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, queries, keys, generator=draw) < share
    one = torch.randint(keys, (2, 1, queries, 1), generator=draw)
    return mask.scatter(3, one, value=True)


@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    tile=st.integers(1, 48),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_tiles_attend_as_the_whole_does(
    queries: int, keys: int, tile: int, share: float, seed: int
) -> None:
    inputs, mask = states(queries, keys, seed), random_mask(queries, keys, share, seed)
    whole = masked_attention(*inputs, mask, scale=0.3)
    tiled = block_sparse_attention(*inputs, mask, scale=0.3, tile=tile)
    torch.testing.assert_close(tiled, whole)
    upstream = torch.randn_like(whole)
    for got, expected in zip(
        torch.autograd.grad(tiled, inputs, upstream),
        torch.autograd.grad(whole, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_a_key_that_no_query_of_a_tile_attends_to_is_not_read() -> None:
    query, keys, values = states(queries=4, keys=4)
    mask = torch.eye(4, dtype=torch.bool).expand(2, 1, 4, 4)
    poisoned = values.detach().clone()
    poisoned[:, :, 3] = torch.nan
    seen = block_sparse_attention(query, keys, poisoned, mask, scale=1.0, tile=2)
    torch.testing.assert_close(seen[:, ::2, :2], values[:, :, :2])  # each query's one key
    assert seen[:, :, 2:].isnan().all()  # the tile that reads it
    whole = masked_attention(query, keys, poisoned, mask, scale=1.0)
    assert whole.isnan().all()  # so that what is read is seen


def test_few_queries_and_masks_that_are_added_are_left_to_sdpa() -> None:
    query, _, _ = states(queries=TILE + 1, keys=3)
    mask = torch.ones(2, 1, TILE + 1, 3, dtype=torch.bool)
    assert is_worthwhile(query, mask)
    assert not is_worthwhile(query[:, :, 1:], mask[:, :, 1:])
    assert not is_worthwhile(query, mask.float())
    assert not is_worthwhile(query.to("meta"), mask)


@pytest.mark.parametrize("keywords", [{}, {"scaling": 0.7}, {"dropout": 0.0}])
def test_the_function_answers_as_sdpa_does(keywords: dict[str, Any]) -> None:
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    for queries, mask in (
        (TILE + 3, random_mask(TILE + 3, 80, 0.2, seed=1)),
        (5, random_mask(5, 80, 0.2, seed=1)),
        (80, None),
    ):
        inputs = states(queries, 80)
        found, expected = (
            AttentionInterface()[name](module, *inputs, mask, **keywords)[0]
            for name in (BLOCK_SPARSE, "sdpa")
        )
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()


def test_other_scores_are_refused_as_by_sdpa() -> None:
    inputs, mask = states(TILE + 3, 80), random_mask(TILE + 3, 80, 0.2, seed=1)
    with pytest.raises(ValueError, match="softcap"):
        AttentionInterface()[BLOCK_SPARSE](torch.nn.Module(), *inputs, mask, softcap=3.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_layers_of_every_family_are_trained_as_with_sdpa(family: str) -> None:
    torch.manual_seed(0)
    blocks = Backbone.short(tiny_model(family).config, 1).double().eval()
    assert blocks.implementation == BLOCK_SPARSE
    tokens = 2 * TILE + 5
    width = blocks.config.hidden_size
    embeddings = torch.randn(2, tokens, width, dtype=torch.float64, requires_grad=True)
    documents = torch.stack([torch.arange(tokens) // 50, torch.arange(tokens) // 70])
    mask = packed_mask(documents)
    positions = torch.arange(tokens)[None]
    found = []
    for name in (BLOCK_SPARSE, "sdpa"):
        blocks.base.set_attn_implementation(name)
        hidden = blocks(positions=positions, mask=mask, embeddings=embeddings)
        (slope,) = torch.autograd.grad(hidden.square().sum(), embeddings)
        found.append((hidden, slope))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fresh_layers_have_the_targets_attention_otherwise() -> None:
    config = tiny_model("llama").config
    config._attn_implementation = "eager"
    assert fresh_attention(config) == "eager"
