import pytest
import torch

from falcon_lab.drafters.fusing import Fuse

KINDS = ["lstm", "lstm_positionwise", "linear"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_twice_the_width_come_out_at_the_width(kind: str) -> None:
    fuse = Fuse(kind, 8, layers=2, dropout=0.0)
    assert fuse(torch.randn(3, 5, 16))[0].shape == (3, 5, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_recurrent_kind_remembers_earlier_rows(kind: str) -> None:
    fuse = Fuse(kind, 8, layers=2, dropout=0.0).eval()
    rows = torch.randn(1, 5, 16)
    changed = rows.clone()
    changed[0, 0] += 1
    difference = (fuse(rows)[0] - fuse(changed)[0]).abs().sum(-1)[0]
    assert difference[0] > 0
    assert bool((difference[1:] > 0).all()) is (kind == "lstm")


def test_going_on_from_a_state_is_running_on() -> None:
    fuse = Fuse("lstm", 8, layers=2, dropout=0.0).eval()
    rows = torch.randn(2, 7, 16)
    whole, _ = fuse(rows)
    first, state = fuse(rows[:, :4])
    second, _ = fuse(rows[:, 4:], state)
    assert torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-6)


def test_dropout_lies_between_the_layers() -> None:
    rows = torch.randn(1, 4, 16)
    two = Fuse("lstm", 8, layers=2, dropout=0.5).train()
    assert not torch.equal(two(rows)[0], two(rows)[0])
    one = Fuse("lstm", 8, layers=1, dropout=0.5).train()
    assert torch.equal(one(rows)[0], one(rows)[0])


def test_few_rows_are_fused_as_many_are_and_kernels_are_put_back() -> None:
    fuse = Fuse("lstm", 8, layers=2, dropout=0.0).eval()
    rows = torch.randn(1, 20, 16)
    enabled = torch.backends.mkldnn.enabled
    with torch.no_grad():
        whole, _ = fuse(rows)
        first, state = fuse(rows[:, :12])
        pieces = [first]
        for start in range(12, 20, 2):
            piece, state = fuse(rows[:, start : start + 2], state)
            pieces.append(piece)
        with pytest.raises(RuntimeError):
            fuse(torch.randn(1, 2, 5))
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-6)
    assert torch.backends.mkldnn.enabled == enabled
