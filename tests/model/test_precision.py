from __future__ import annotations

import pytest
import torch

from falcon_lab.model import precision
from falcon_lab.model.precision import bfloat16_gain, fastest_dtype

CPU = torch.device("cpu")


def test_the_type_is_the_one_whose_products_take_less_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gain, expected in ((3.0, torch.bfloat16), (0.6, torch.float32)):
        monkeypatch.setattr(precision, "bfloat16_gain", lambda gain=gain: gain)
        assert fastest_dtype(CPU) == expected


def test_a_gpu_takes_bfloat16_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(precision, "bfloat16_gain")
    assert fastest_dtype(torch.device("cuda", 0)) == torch.bfloat16


def test_the_gain_is_float32_seconds_over_those_of_bfloat16_and_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[torch.dtype] = []

    def fastest(call: object, device: torch.device, *, seconds: float) -> float:
        product = call()  # type: ignore[operator]
        assert product.shape == (precision.TOKENS, precision.HIDDEN)
        timed.append(product.dtype)
        return {torch.float32: 6.0, torch.bfloat16: 2.0}[product.dtype]

    monkeypatch.setattr(precision, "fastest", fastest)
    bfloat16_gain.cache_clear()
    try:
        assert bfloat16_gain() == bfloat16_gain() == 3.0
        assert timed == [torch.float32, torch.bfloat16]
    finally:
        bfloat16_gain.cache_clear()
