"""Prefix and tree, merged, against PyTorch's attention with the whole mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from falcon_lab.model.attention import merged as merged_module
from falcon_lab.model.attention.backend import Partial, masked_attention, widened
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.torch_flash import TorchFlash
from falcon_lab.tree import ancestor_matrix

SIZE = 8
SCALE = 0.4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Spy:
    """PyTorch's kernel, which notes the keys of every call."""

    calls: list[tuple[int, bool]] = field(default_factory=list)
    name: str = "spy"
    refusal: str | None = None

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return self.refusal

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        self.calls.append((keys.shape[2], causal))
        return TorchFlash()(query, keys, values, scale=scale, causal=causal)


@dataclass(frozen=True)
class Case:
    query: Tensor
    keys: Tensor
    values: Tensor
    tree: Tensor

    @property
    def whole(self) -> Tensor:
        """The mask of all keys, written without the code under test."""
        new, seen = self.query.shape[2], self.keys.shape[2]
        mask = torch.ones(self.tree.shape[0], 1, new, seen, dtype=torch.bool)
        mask[..., seen - new :] = self.tree
        return mask

    def expected(self) -> Tensor:
        """In float64, with a copy of the keys for every query head."""
        heads = self.query.shape[1] // self.keys.shape[1]
        keys, values = (x.double().repeat_interleave(heads, 1) for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(
            self.query.double(), keys, values, attn_mask=self.whole, scale=SCALE
        )

    def off(self, seen: Tensor) -> float:
        return float((seen.double() - self.expected()).abs().max())

    @property
    def tolerance(self) -> float:
        """A score is as exact as it is large; a type of two bytes rounds more than that."""
        scores = self.query.double().abs().amax() * self.keys.double().abs().amax() * SIZE
        exact = torch.finfo(torch.promote_types(self.query.dtype, torch.float32)).eps
        return max(TOLERANCE[self.query.dtype], exact * float(scores))


def case(
    parents: list[list[int]],
    prefix: int,
    *,
    groups: int = 2,
    heads: int = 2,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
) -> Case:
    """One tree for all rows of a batch or one for each; ``heads`` query heads for a key head."""
    new = len(parents[0])
    drawn = torch.Generator().manual_seed(new + 100 * prefix)

    def states(count: int, rows: int) -> Tensor:
        # As a cache and a projection lay them out: the rows of a head are not side by side.
        made = torch.randn(batch, rows, count, SIZE, generator=drawn, dtype=torch.float64)
        return made.to(dtype).transpose(1, 2)

    tree = torch.stack([ancestor_matrix(torch.tensor(each)) for each in parents])[:, None]
    query = spread * states(groups * heads, new)
    keys, values = states(groups, prefix + new), states(groups, prefix + new)
    return Case(query, keys, values, tree)


def test_a_widened_mask_lets_all_rows_see_what_is_older() -> None:
    ancestors = ancestor_matrix(torch.tensor([-1, 0, 0, 1]))
    assert widened(ancestors, 6).int().tolist() == [
        *([1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1])
    ]
    assert widened(ancestors, 4) is ancestors


def parents_of(draw: st.DrawFn, nodes: int) -> list[int]:
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, batch = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    trees = draw(st.sampled_from([1, batch]))
    return case(
        [parents_of(draw, nodes) for _ in range(trees)],
        draw(st.sampled_from([0, 1, 2, 40])),
        groups=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        batch=batch,
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        spread=draw(st.sampled_from([1.0, 100.0])),
    )


@given(cases())
def test_a_tree_behind_any_prefix_is_attended_as_through_the_whole_mask(it: Case) -> None:
    spy = Spy()
    seen = Merged(spy)(it.query, it.keys, it.values, it.tree, scale=SCALE)
    assert seen.dtype == it.query.dtype
    assert seen.shape == it.query.shape
    assert it.off(seen) < it.tolerance
    prefix = it.keys.shape[2] - it.query.shape[2]
    assert spy.calls == ([(prefix, False)] if prefix else [])  # it never gets an empty one


@given(cases())
def test_a_whole_mask_gives_the_same(it: Case) -> None:
    spy = Spy()
    seen = Merged(spy)(it.query, it.keys, it.values, it.whole, scale=SCALE)
    assert it.off(seen) < it.tolerance
    assert not spy.calls


@given(cases())
def test_masked_attention_is_the_definition(it: Case) -> None:
    for mask in (it.tree, it.whole):
        seen = masked_attention(it.query, it.keys, it.values, mask, scale=SCALE)
        assert it.off(seen) < it.tolerance


@pytest.mark.parametrize("prefix", [0, 1, 30])
@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_text_needs_no_mask_where_the_kernel_knows_its_order(
    prefix: int, new: int, heads: int
) -> None:
    it = case([list(range(-1, new - 1))], prefix, heads=heads, batch=2)
    spy = Spy()
    seen = Merged(spy, least=999)(it.query, it.keys, it.values, it.tree, scale=SCALE, causal=True)
    assert it.off(seen) < 2e-6
    assert (new, new > 1) in spy.calls
    assert len(spy.calls) == (2 if prefix else 1)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 4, 0, dtype=torch.bool)])
def test_rows_that_all_see_all_keys_need_no_mask(mask: Tensor | None) -> None:
    it = case([[-1, 0, 1, 2]], 5, heads=3)
    everything = Case(it.query, it.keys, it.values, torch.ones(1, 1, 4, 4, dtype=torch.bool))
    spy = Spy()
    seen = Merged(spy)(it.query, it.keys, it.values, mask, scale=SCALE)
    assert everything.off(seen) < 2e-6
    assert not spy.calls


def without_merging() -> Iterator[tuple[str, Spy, int]]:
    yield "a context shorter than what pays", Spy(), 6
    yield "a kernel that refuses the tensors", Spy(refusal="no"), 0


@pytest.mark.parametrize(
    ("spy", "least"), [pytest.param(spy, least, id=name) for name, spy, least in without_merging()]
)
@pytest.mark.parametrize("causal", [False, True])
def test_what_cannot_or_should_not_be_merged_goes_through_the_whole_mask(
    spy: Spy, least: int, causal: bool
) -> None:
    it = case([[-1, 0, 1]], 5)
    causal = causal and spy.refusal is not None
    backend = Merged(spy, least)
    seen = backend(it.query, it.keys, it.values, it.tree, scale=SCALE, causal=causal)
    assert it.off(seen) < 2e-6
    assert not spy.calls


def test_a_tree_too_large_to_be_written_out_goes_through_the_whole_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, spy = case([[-1, 0, 0, 1]], 5), Spy()
    monkeypatch.setattr(merged_module, "LARGEST_TREE", 3)
    assert it.off(Merged(spy)(it.query, it.keys, it.values, it.tree, scale=SCALE)) < 2e-6
    assert not spy.calls
    monkeypatch.setattr(merged_module, "LARGEST_TREE", 4)
    Merged(spy)(it.query, it.keys, it.values, it.tree, scale=SCALE)
    assert spy.calls == [(5, False)]


def test_values_of_another_size_than_the_keys_go_through_the_whole_mask() -> None:
    it, spy = case([[-1, 0, 0]], 4), Spy()
    seen = Merged(spy)(it.query, it.keys, it.values[..., :4], it.tree, scale=SCALE)
    assert torch.allclose(seen, it.expected()[..., :4].float(), atol=2e-6)
    assert not spy.calls
