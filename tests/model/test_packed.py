"""Packed weights give what plain ones give, and follow every change of them."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.model import packed
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.lean import FAMILIES as LEAN
from falcon_lab.model.lm_head import LMHead
from falcon_lab.model.masks import causal_mask
from falcon_lab.model.packed import JoinedMaps, NormedMap, Packing, linear
from tiny_models import tiny_model

WIDTH = 512
needs_packing = pytest.mark.skipif(
    not packed.packs(torch.float32), reason="oneDNN packs nothing here"
)
pytestmark = needs_packing


def _weight(dtype: torch.dtype = torch.float32, rows: int = WIDTH) -> nn.Parameter:
    drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return nn.Parameter((drawn / WIDTH**0.5).to(dtype), requires_grad=False)


def _rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)).to(dtype)


@torch.no_grad()
def _product(packing: Packing, weight: Tensor, rows: Tensor) -> Tensor:
    (found,) = packing([weight], rows)
    assert found is not None
    return linear(rows, weight, None, found)


def _near(found: Tensor, weight: Tensor, rows: Tensor) -> bool:
    expected = functional.linear(rows.double(), weight.double())
    room = 1e-5 if weight.dtype == torch.float32 else 3e-2
    return torch.allclose(found.double(), expected, atol=room, rtol=room)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_products_of_every_number_of_rows_are_those_of_the_plain_weight(
    dtype: torch.dtype,
) -> None:
    weight, packing, bias = _weight(dtype), Packing(), torch.randn(WIDTH).to(dtype)
    for count in (*range(65), 200):
        rows = _rows(count, dtype)
        (found,) = packing([weight], rows)
        assert (found is not None) == (count >= packed.FEWEST[dtype])
        product = linear(rows[None], weight, bias, found)[0] - bias
        assert _near(product, weight, rows)


@pytest.mark.parametrize("family", sorted(LEAN))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_passes_of_all_widths_equal_the_modules(family: str, dtype: torch.dtype) -> None:
    base = tiny_model(family, hidden=WIDTH).get_decoder().to(dtype)
    for weight in base.parameters():
        if weight.dim() > 1:
            weight.mul_(0.2)  # drawn for narrow layers
    lean, plain = Backbone(base, lean=True), Backbone(base)
    assert lean.lean is not None
    for count in (1, 2, 3, 5, 8, 13, 32, 64):
        found, expected = (_read(way, way.new_cache(80), count) for way in (lean, plain))
        off = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert off < (1e-5 if dtype == torch.float32 else 0.05)


def _read(backbone: Backbone, cache: KVCache, count: int) -> Tensor:
    tokens = torch.arange(10 + count)[None] % 60
    outputs = []
    for part in tokens.split([10, count], dim=1):
        new = part.shape[1]
        positions = torch.arange(cache.length, cache.length + new)[None]
        mask = causal_mask(new, 0, tokens.device)
        outputs.append(backbone(tokens=part, positions=positions, mask=mask, cache=cache))
    return torch.cat(outputs, dim=1)


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _under_inference(weight: nn.Parameter) -> None:
    with torch.inference_mode():
        weight.add_(1)


def _there_and_back(weight: nn.Parameter) -> None:
    weight.data = weight.data.bfloat16()
    weight.data = weight.data.float()


@pytest.mark.parametrize("change", [_in_place, _under_inference, _there_and_back])
def test_a_changed_weight_is_packed_anew(change: Callable[[nn.Parameter], None]) -> None:
    weight, packing, rows = _weight(), Packing(), _rows(8)
    before = _product(packing, weight, rows)
    change(weight)
    after = _product(packing, weight, rows)
    assert not torch.equal(before, after)
    assert _near(after, weight, rows)


def test_copies_and_pickles_pack_for_themselves() -> None:
    head, rows = LMHead(nn.Linear(WIDTH, 600, bias=True).requires_grad_(False), _config()), _rows(8)
    with torch.no_grad():
        expected = head(rows)
        for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
            assert torch.equal(twin(rows), expected)
            twin.linear.weight.zero_()
            assert torch.equal(head(rows), expected)
    assert set(head.state_dict()) == {"linear.weight", "linear.bias"}


def _config() -> Any:
    return tiny_model("llama", layers=1).config


@torch.no_grad()
def test_small_weights_other_dtypes_and_full_memory_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = _rows(8)
    assert Packing()([_weight(rows=8)], rows) == [None]
    assert Packing()([_weight(torch.float64)], rows.double()) == [None]
    assert Packing()([_weight(torch.bfloat16)], rows) == [None]
    weight = _weight()
    monkeypatch.setattr(packed, "free_memory", lambda _: 2 * weight.nbytes - 1)
    assert Packing()([weight], rows) == [None]
    monkeypatch.setattr(packed, "free_memory", lambda _: 2 * weight.nbytes)
    assert Packing()([weight], rows) != [None]


def test_gradients_autocast_and_tracing_see_plain_weights() -> None:
    head = LMHead(nn.Linear(WIDTH, WIDTH), _config())
    rows = _rows(8)
    assert head(rows).requires_grad
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(rows).dtype == torch.bfloat16
    with torch.no_grad():
        expected = head(rows)
        program = torch.export.export(head, (rows,))
        assert torch.allclose(program.module()(rows), expected, atol=1e-5)
    assert "mkldnn" not in program.graph_module.code


def test_weights_whose_changes_nobody_counts_are_left_alone() -> None:
    with torch.inference_mode():
        assert Packing()([torch.ones(WIDTH, WIDTH)], _rows(8)) == [None]
    weight, packing, rows = _weight(), Packing(), _rows(8)
    _product(packing, weight, rows)
    weight.requires_grad_()
    with torch.no_grad():
        assert packing([weight], rows) == [None]


@torch.no_grad()
def test_a_change_leaves_no_copy_behind() -> None:
    weight, packing, rows = _weight(), Packing(), _rows(8)
    first = weakref.ref(packing([weight], rows)[0])
    assert first() is not None
    assert packing([weight], rows)[0] is first()
    weight.add_(0.01)
    _product(packing, weight, rows)
    assert first() is None


def _maps(dtype: torch.dtype, rows: int = WIDTH) -> list[NormedMap]:
    """Maps behind norms of their own; one has a bias."""
    drawn = torch.Generator().manual_seed(3)
    norms = [torch.rand(WIDTH, generator=drawn).to(dtype) + 0.5 for _ in range(3)]
    weights = [_weight(dtype, rows + count) for count in range(3)]
    biases = [None, torch.randn(rows + 1, generator=drawn).to(dtype), None]
    return [NormedMap(*one) for one in zip(norms, weights, biases, strict=True)]


def _one_by_one(maps: list[NormedMap], rows: Tensor) -> list[Tensor]:
    return [
        functional.linear(functional.rms_norm(rows, (WIDTH,), one.norm, 1e-5), *one[1:])
        for one in maps
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_joined_maps_give_what_each_gives_and_follow_every_change(dtype: torch.dtype) -> None:
    maps, rows = _maps(dtype), _rows(8, dtype)
    joined, room = JoinedMaps(maps, 1e-5), 1e-4 if dtype == torch.float32 else 0.1
    twin = copy.deepcopy(joined)
    for change in (lambda: None, lambda: maps[0].norm.mul_(2), lambda: maps[2].weight.mul_(-1)):
        change()
        found = joined(rows[None])
        assert found is not None
        for one, expected in zip(found, _one_by_one(maps, rows), strict=True):
            torch.testing.assert_close(one[0], expected, rtol=room, atol=room)
    left = twin(rows[None])
    assert left is not None
    assert not torch.allclose(left[0], found[0])


@torch.no_grad()
def test_maps_that_gain_nothing_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows(8)
    assert JoinedMaps(_maps(torch.float32, rows=8), 1e-5)(rows) is None
    assert JoinedMaps(_maps(torch.float32), 1e-5)(rows[:1]) is None
    trained = _maps(torch.float32)
    trained[1].weight.requires_grad_()
    assert JoinedMaps(trained, 1e-5)(rows) is None
    monkeypatch.setattr(packed, "free_memory", lambda _: 1000)
    assert JoinedMaps(_maps(torch.float32), 1e-5)(rows) is None
