"""What training and validation report, kept as sums and counts.

Sums and counts add up over steps and over the processes of a distributed training; means do not.

Shapes: B sequences, R prediction rows, R' rows that count, G blocks, G' complete blocks, k block,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from falcon_lab.glancing import complete_blocks, number_blocks
from falcon_lab.interfaces import LabelledRows, Prediction
from falcon_lab.sampling import most_likely


class Tally:
    """Named sums and counts.

    Every process of a distributed training must add the same names in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add ``values`` (any shape)."""
        self.add_sum(name, values.detach().sum(), values.numel())

    def add_sum(self, name: str, total: Tensor | float, count: float) -> None:
        """Add a sum of ``count`` values."""
        entry = torch.as_tensor(total, dtype=torch.float64, device=self._device)
        known = name in self._sums
        self._sums[name] = self._sums[name] + entry if known else entry
        self._counts[name] = self._counts[name] + count if known else count

    def reduced(self) -> dict[str, tuple[float, float]]:
        """Return sum and count of every name, over all processes."""
        if not self._sums:
            return {}
        counts = torch.tensor(list(self._counts.values()), dtype=torch.float64)
        entries = torch.stack([torch.stack(list(self._sums.values())), counts.to(self._device)])
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(entries)
        return dict(zip(self._sums, zip(*entries.tolist(), strict=True), strict=True))


def means(reduced: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of every name that has values."""
    return {name: total / count for name, (total, count) in reduced.items() if count}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which places of which blocks the rows that count have.

    Attributes:
        slot: ``[R']`` long, place in the block.
        number: ``[R']`` long, block of the row.
        complete: ``[G]`` bool, blocks whose k rows all count.
        block: k.
    """

    slot: Tensor
    number: Tensor
    complete: Tensor
    block: int


def blocks_of(
    prediction: Prediction, valid: Tensor, block: int, index: tuple[Tensor, ...] | None = None
) -> Blocks:
    """Return the blocks of a prediction's valid rows.

    Args:
        prediction: the drafter's.
        valid: ``[B, R]`` bool.
        block: k.
        index: two ``[R']`` long, sequence and row of each valid row; None: in their order.
    """
    if index is None:
        index = valid.nonzero(as_tuple=True)
    number, sequence = number_blocks(prediction.group)
    complete = complete_blocks(valid, number, sequence.shape[0], block)
    return Blocks(prediction.slot[index], number[index], complete, block)


def agreement(rows: LabelledRows) -> Tensor:
    """Return ``[R']`` bool: whether the drafter's most likely token is the target's."""
    return most_likely(rows.student_logits) == rows.label(most_likely(rows.teacher_logits))


def overlap(rows: LabelledRows) -> Tensor:
    """Return ``[R']``: 1 - TV(p, q), the probability that sampling accepts a token of q."""
    p, q = rows.teacher_logits.float().softmax(-1), rows.student_logits.float().softmax(-1)
    if rows.mass is not None:
        p = p * rows.mass.unsqueeze(-1)
    return torch.minimum(p, q).sum(-1)


def expected_length(accepted: Tensor, blocks: Blocks) -> Tensor:
    """Return ``[G']``: 1 + Σ_j Π_{i≤j} accepted_i of each complete block.

    That is the acceptance length τ of one pass, the bonus token counted.

    Args:
        accepted: ``[R']``, whether each row's token is accepted, or how likely.
        blocks: of the rows.
    """
    table = accepted.new_zeros(blocks.complete.shape[0], blocks.block, dtype=torch.float32)
    table[blocks.number, blocks.slot] = accepted.float()
    return 1 + table[blocks.complete].cumprod(1).sum(1)


def add_by_position(tally: Tally, key: str, values: Tensor, blocks: Blocks) -> None:
    """Add ``values`` ``[R']`` by place in the block, 1..k; ``key`` has a ``{}`` for it."""
    for slot in range(blocks.block):
        tally.add(key.format(slot + 1), values[blocks.slot == slot].float())


def add_drafted(tally: Tally, agree: Tensor, accept: Tensor, blocks: Blocks) -> None:
    """Add how much of the drafts would be accepted.

    Args:
        tally: of the validation.
        agree: ``[R']`` bool, whether greedy decoding accepts the row's token.
        accept: ``[R']``, how likely sampling accepts it.
        blocks: of the rows.
    """
    tally.add("val/accept_rate", accept)
    add_by_position(tally, "val/position_{}/accept_rate", accept, blocks)
    add_by_position(tally, "val/position_{}/accuracy", agree, blocks)
    tally.add("val/expected_accept_length", expected_length(agree, blocks))
    tally.add("val/expected_accept_length_sampled", expected_length(accept, blocks))
