"""A linear regression over rows that come in parts."""

from __future__ import annotations

import torch

from falcon_lab.drafters.least_squares import LeastSquares, within


def test_a_map_and_its_intercept_are_found_from_rows_that_come_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    rule, bias = torch.randn(5, 6, generator=generator), torch.randn(6, generator=generator)
    given = torch.randn(400, 5, generator=generator) + 2
    sums = LeastSquares()
    for part in given.split(150):
        sums.add(part, (part @ rule + bias).unflatten(1, (2, 3)))
    found, intercept = sums.solve()
    assert sums.count == 400
    torch.testing.assert_close(found, rule.double(), atol=0.01, rtol=0)
    torch.testing.assert_close(intercept[0], bias.double(), atol=0.01, rtol=0)


def test_a_row_counts_as_much_as_its_weight_says() -> None:
    given = torch.tensor([[-1.0], [1.0], [1.0]])
    outcomes = torch.tensor([[0.0], [1.0], [3.0]])
    sums = LeastSquares()
    sums.add(given, outcomes, torch.tensor([1.0, 3.0, 1.0]))
    found, intercept = sums.solve()
    # The two rows that are given the same have the weighted mean 1.5.
    torch.testing.assert_close(found[0, 0], torch.tensor(0.75).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(intercept[0, 0], torch.tensor(0.75).double(), atol=1e-3, rtol=0)


def test_without_an_intercept_nothing_follows_from_nothing() -> None:
    sums = LeastSquares(intercept=False)
    sums.add(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [3.0]]))
    found, intercept = sums.solve()
    torch.testing.assert_close(found[0, 0], torch.tensor(9 / 5).double(), atol=1e-3, rtol=0)
    assert not len(intercept)


def test_positions_whose_outcome_is_padding_or_of_another_document_are_not_within() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    assert within(documents, 1).tolist() == [[True, True, False, True, False, False]]
    assert within(documents, 2).tolist() == [[True, False, False, False, False]]
    assert within(documents, 7).shape == within(documents, 9).shape == (1, 0)
