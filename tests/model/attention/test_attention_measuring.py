"""What is timed computes the same thing."""

from __future__ import annotations

import pytest
import torch

from falcon_lab.model.attention.choosing import SDPA, AttentionShape, calls, time_attention
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.torch_flash import TorchFlash
from tiny_models import tiny_target

SHAPE = AttentionShape(6, 2, 8, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("rows", [1, 16])
def test_every_backend_is_given_the_same_attention(rows: int) -> None:
    found = calls({"merged": Merged(TorchFlash())}, SHAPE, 50, rows)
    expected = found[SDPA]().reshape(1, 6, rows, 8)
    assert torch.allclose(found["merged"](), expected, atol=2e-6)


def test_every_backend_is_timed_at_every_context_and_number_of_rows() -> None:
    backends = {"merged": Merged(TorchFlash())}
    found = list(time_attention(backends, SHAPE, [4, 8], [1, 3], seconds=1e-4))
    assert [(t.backend, t.context, t.rows) for t in found] == [
        (name, context, rows) for context in (4, 8) for rows in (1, 3) for name in (SDPA, "merged")
    ]
    assert all(timing.seconds > 0 for timing in found)


def test_a_shape_is_a_target_s() -> None:
    grouped = AttentionShape.of(tiny_target("llama"))
    assert (grouped.heads, grouped.groups, grouped.head_size) == (4, 2, 8)
    assert AttentionShape.of(tiny_target("gpt2")).groups == 4
