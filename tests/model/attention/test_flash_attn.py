"""The call of the package ``flash_attn``, through a module that stands for it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.model.attention.flash_attn import FlashAttn, absence
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.torch_flash import TorchFlash
from falcon_lab.tree import ancestor_matrix

CUDA = torch.device("cuda")
B, A, G, N, P, D = 2, 6, 3, 5, 11, 8


class FakeFlashAttn(types.ModuleType):
    """Computes what the package documents, from its own layout, and keeps the arguments."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        return_softmax_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append({"q": q, "k": k_cache, "causal": causal, "lse": return_softmax_lse})
        shared = q.shape[2] // k_cache.shape[2]
        keys, values = (x.repeat_interleave(shared, 2) for x in (k_cache, v_cache))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * softmax_scale
        if causal:  # aligned to the bottom right
            rows, columns = scores.shape[-2:]
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            scores = scores.masked_fill(~seen, -torch.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttn:
    fake = FakeFlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setattr(FlashAttn, "refuses", lambda *_: None)
    return fake


def attend(kernel: Any, mask: Tensor | None, causal: bool = False) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    query = torch.randn(B, A, N, D, generator=drawn)
    keys, values = (torch.randn(B, G, P + N, D, generator=drawn) for _ in range(2))
    return Merged(kernel)(query, keys, values, mask, scale=0.3, causal=causal)


TREE = ancestor_matrix(torch.tensor([-1, 0, 0, 2, 1]))[None, None]


def test_a_tree_s_prefix_is_read_without_a_mask_and_with_its_log_sum_exp(
    package: FakeFlashAttn,
) -> None:
    seen = attend(FlashAttn(), TREE)
    assert torch.allclose(seen, attend(TorchFlash(), TREE), atol=2e-6)
    [call] = package.calls
    assert call["q"].shape == (B, N * A // G, G, D)  # [B, T, heads, D]: a group's rows together
    assert call["k"].shape == (B, P, G, D)
    assert call["k"].stride(-1) == 1  # the one thing that the package asks of its layout
    assert call["causal"] is False
    assert call["lse"] is True


def test_a_chunk_of_a_text_is_read_in_its_order(package: FakeFlashAttn) -> None:
    mask = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    seen = attend(FlashAttn(), mask, causal=True)
    assert torch.allclose(seen, attend(TorchFlash(), mask), atol=2e-6)
    assert {(call["q"].shape, call["k"].shape, call["causal"]) for call in package.calls} == {
        ((B, N, A, D), (B, P, G, D), False),
        ((B, N, A, D), (B, N, G, D), True),
    }


def test_the_package_is_known_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = types.ModuleType("flash_attn")  # what another distribution installs
    monkeypatch.setitem(sys.modules, "flash_attn", namespace)
    assert absence() == "another package of that name; it is not used"
    assert FlashAttn().refuses(CUDA, torch.bfloat16, 64) == absence()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert absence() == "not installed (extra 'flash')"
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn())
    assert absence() is None


def test_it_refuses_what_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert FlashAttn().refuses(CUDA, torch.bfloat16, 64) is None
    assert "not on cpu" in str(FlashAttn().refuses(torch.device("cpu"), torch.bfloat16, 64))
    assert "not float32" in str(FlashAttn().refuses(CUDA, torch.float32, 64))
    assert "not 100" in str(FlashAttn().refuses(CUDA, torch.float16, 100))
    assert "not 512" in str(FlashAttn().refuses(CUDA, torch.float16, 512))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    older = torch.device("cuda", 1)  # capabilities are asked for once for each GPU
    assert FlashAttn().refuses(older, torch.float16, 64) == "the GPU is older than Ampere"
