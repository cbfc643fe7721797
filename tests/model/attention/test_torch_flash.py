"""PyTorch's own operators, below the public function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from falcon_lab.model.attention.torch_flash import TorchFlash

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_it_tells_the_log_sum_exp_of_the_scores(dtype: torch.dtype, causal: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=drawn).to(dtype)
    keys, values = (
        torch.randn(2, 2, 5 + 4 * (not causal), 8, generator=drawn).to(dtype) for _ in "kv"
    )
    part = TorchFlash()(query, keys, values, scale=0.3, causal=causal)
    wide = [x.double().repeat_interleave(2, 1) for x in (keys, values)]
    exact = F.scaled_dot_product_attention(query.double(), *wide, scale=0.3, is_causal=causal)
    scores = 0.3 * query.double() @ wide[0].mT
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    tolerance = 1e-6 if dtype.itemsize > 2 else 3e-2
    assert torch.allclose(part.seen.double(), exact, atol=tolerance)
    assert torch.allclose(part.lse.double(), scores.logsumexp(-1), atol=tolerance)
    assert part.lse.dtype.itemsize >= 4


def test_it_refuses_what_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TorchFlash()
    assert kernel.refuses(CPU, torch.float64, 7) is None
    assert kernel.refuses(CPU, torch.int64, 8) == "it does not support torch.int64"
    assert "not on mps" in str(kernel.refuses(torch.device("mps"), torch.float16, 64))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert kernel.refuses(CUDA, torch.float16, 64) == "this build of PyTorch has none"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert "not float32" in str(kernel.refuses(CUDA, torch.float32, 64))
