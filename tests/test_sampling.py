from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.fields import TEMPERATURES
from falcon_lab.sampling import Sampling, drawn, most_likely

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def kept(**options: Any) -> list[float]:
    return Sampling(**options).probabilities(LOGITS).tolist()


def test_the_filters_keep_the_most_likely_tokens_and_renormalise() -> None:
    assert kept(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert kept(temperature=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0])
    assert kept(temperature=1.0, top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0])
    assert kept(temperature=1.0, top_p=0.81) == pytest.approx(
        [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    )
    assert kept(temperature=1.0, top_p=1e-9) == [1, 0, 0, 0]
    assert kept(temperature=1.0, top_k=3, top_p=0.5) == [1, 0, 0, 0]
    assert kept(temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 1.0]])
    assert Sampling().probabilities(logits).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Sampling().draw(logits, torch.Generator()).tolist() == [1, 0]


def test_a_seed_gives_one_draw_and_shapes_are_kept() -> None:
    sampling = Sampling(temperature=1.0)
    rows = LOGITS.expand(5, 3, 4)
    first, again = (sampling.draw(rows, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == (5, 3)
    assert torch.equal(first, again)
    assert sampling.draw(LOGITS, torch.Generator()).shape == ()


def test_tokens_are_drawn_as_often_as_they_are_likely_and_impossible_ones_never() -> None:
    likely = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    found = drawn(likely.expand(20_000, 7), generator)
    counts = found.bincount(minlength=7)
    assert counts[likely == 0].sum() == 0
    expected = 20_000 * likely[likely > 0]
    statistic = ((counts[likely > 0] - expected) ** 2 / expected).sum()
    assert statistic < 16.27  # chi-square, 3 degrees of freedom, p = 0.001


def test_a_token_that_float32_would_lose_beside_the_others_is_drawn() -> None:
    odds = torch.cat([torch.tensor([1.0]), torch.full((60_000,), 2e-8)])
    generator = torch.Generator().manual_seed(0)
    found = sum(int(drawn(odds, generator)) > 0 for _ in range(3000))
    assert 0 < found < 15  # 3.6 are expected; sums in float32 stay at 1


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_a_setting_out_of_range_is_refused_by_name(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0, 1e-300, 5e-324])
def test_a_temperature_that_no_softmax_survives_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature)


@pytest.mark.parametrize("temperature", [TEMPERATURES.least, TEMPERATURES.most])
def test_probabilities_are_whole_at_both_ends_of_temperature(temperature: float) -> None:
    found = Sampling(temperature).probabilities(torch.tensor([[3e4, -3e4, 0.0], [1.0, 2.0, 0.5]]))
    assert found.isfinite().all()
    assert found.sum(-1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("size", [7, 4096, 4100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_is_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(3, 20, size, generator=generator).to(dtype)  # many ties in bfloat16
    logits[0, 0, -1] = logits[0, 1, 0] = 99
    logits[0, 2, [5, size // 2, size - 1]] = 99
    logits[0, 3] = -torch.inf
    places = torch.arange(size)
    first = torch.where(logits == logits.amax(-1, keepdim=True), places, size).amin(-1)
    assert torch.equal(most_likely(logits), first)
    assert torch.equal(most_likely(logits[..., 1:]), (logits[..., 1:].contiguous()).argmax(-1))
    assert most_likely(logits[:0]).shape == (0, 20)
