import pytest
import torch
from torch import nn

from falcon_lab.drafters.fusing import Unrolled


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_recurrence_is_the_module_s_and_its_state_that_of_the_row_asked_for(
    layers: int, sequences: int
) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 4, layers, batch_first=True).double().eval()
    rows = torch.randn(sequences, 5, 6, dtype=torch.float64)
    state = tuple(torch.randn(layers, sequences, 4, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for last in range(5):
            fused, hidden, cell = Unrolled(lstm)(rows, *state, torch.tensor([last]))
            expected, (h, c) = lstm(rows[:, : last + 1], state)
            assert torch.allclose(fused[:, : last + 1], expected)
            assert torch.allclose(hidden, h)
            assert torch.allclose(cell, c)
