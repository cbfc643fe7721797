"""The p-values are scipy's."""

from __future__ import annotations

import pytest
import torch

from fakes.statistics import chi_square as by_scipy
from falcon_lab.testing.reference import chi_square


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_the_p_value_is_scipys(seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(5, 5, generator=generator).double().mul(2).flatten().softmax(0).view(5, 5)
    drawn = (exact + shift).flatten() / (exact + shift).sum()
    outcomes = torch.multinomial(drawn, 400, replacement=True, generator=generator)
    texts = torch.stack((outcomes // 5, outcomes % 5), 1)
    ours, theirs = chi_square(texts, exact), by_scipy(texts, exact)
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)
    assert (ours > 1e-3) == (shift == 0.0)


def test_an_impossible_outcome_is_no_chance_at_all() -> None:
    exact = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    assert chi_square(torch.tensor([[1, 0]]), exact) == 0.0
