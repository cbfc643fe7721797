"""FlashAttention on a GPU against PyTorch's attention with the whole mask."""

from __future__ import annotations

import pytest
import torch

from falcon_lab.model.attention.backend import Kernel, masked_attention
from falcon_lab.model.attention.choosing import AUTO, use_backend
from falcon_lab.model.attention.kernels import KERNELS
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.self_check import check_target
from falcon_lab.tree import ancestor_matrix
from tiny_models import FAMILIES, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def skip_unusable(kernel: Kernel, dtype: torch.dtype, size: int) -> None:
    if reason := kernel.refuses(torch.device("cuda"), dtype, size):
        pytest.skip(reason)


@every_kernel
@every_dtype
@pytest.mark.parametrize("prefix", [0, 1, 63, 700])
@pytest.mark.parametrize(("nodes", "causal"), [(1, False), (17, False), (17, True), (300, True)])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 64), (8, 2, 128)])
def test_a_backend_is_sdpa_with_the_whole_mask(
    kernel: Kernel,
    dtype: torch.dtype,
    prefix: int,
    nodes: int,
    causal: bool,
    heads: int,
    groups: int,
    size: int,
) -> None:
    skip_unusable(kernel, dtype, size)
    drawn = torch.Generator("cuda").manual_seed(0)

    def states(rows: int, count: int) -> torch.Tensor:
        return torch.randn(2, rows, count, size, generator=drawn, device="cuda", dtype=dtype)

    query, keys, values = states(heads, nodes), *(states(groups, prefix + nodes) for _ in "kv")
    parents = range(-1, nodes - 1) if causal else [node // 2 - 1 for node in range(1, nodes + 1)]
    tree = ancestor_matrix(torch.tensor(list(parents))).cuda()[None, None]
    scale = size**-0.5
    seen = Merged(kernel)(query, keys, values, tree, scale=scale, causal=causal)
    exact = masked_attention(query.double(), keys.double(), values.double(), tree, scale=scale)
    plain = masked_attention(query, keys, values, tree, scale=scale)
    assert seen.dtype == dtype
    # No further from the truth than sdpa itself, give or take a rounding.
    allowed = 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps
    assert (seen.double() - exact).abs().max() <= allowed


@every_kernel
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_its_check_with_a_backend(family: str, kernel: Kernel) -> None:
    target = tiny_target(family, hidden=64)
    target.model.to(torch.float16)
    target.to("cuda")
    skip_unusable(kernel, torch.float16, 16)
    use_backend(target, kernel.name, print)
    check_target(target)


def test_auto_measures_and_says_what_it_took() -> None:
    target, said = tiny_target(hidden=64), list[str]()
    target.model.to(torch.bfloat16)
    use_backend(target.to("cuda"), AUTO, said.append)
    assert "torch_flash" in said[0]
    check_target(target)
