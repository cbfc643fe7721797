"""What training and validation report, kept as sums and counts.

Sums and counts add up over steps and over the processes of a distributed training; means do not.

Shapes: R' rows that count, G' complete blocks, k block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from falcon_lab.glancing import complete_blocks, number_blocks
from falcon_lab.interfaces import LabelledRows, Prediction


class Tally:
    """Named sums and counts.

    Every process of a distributed training must add the same names in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Count ``values`` (any shape) in."""
        self.add_sum(name, values.detach().sum(), values.numel())

    def add_sum(self, name: str, total: Tensor | float, count: float) -> None:
        """Count a sum of ``count`` values in."""
        entry = torch.as_tensor(total, dtype=torch.float64, device=self._device)
        known = name in self._sums
        self._sums[name] = self._sums[name] + entry if known else entry
        self._counts[name] = self._counts[name] + count if known else count

    def reduced(self) -> dict[str, tuple[float, float]]:
        """Sum and count of every name, over all processes."""
        if not self._sums:
            return {}
        counts = torch.tensor(list(self._counts.values()), dtype=torch.float64)
        entries = torch.stack([torch.stack(list(self._sums.values())), counts.to(self._device)])
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(entries)
        return dict(zip(self._sums, zip(*entries.tolist(), strict=True), strict=True))


def means(reduced: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The mean of every name that was counted at all."""
    return {name: total / count for name, (total, count) in reduced.items() if count}


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the rows that count stand in their blocks.

    Attributes:
        slot: ``[R']`` long.
        number: ``[R']`` long, block of the row.
        complete: ``[G]`` bool, blocks whose k rows all count.
        block: k.
    """

    slot: Tensor
    number: Tensor
    complete: Tensor
    block: int


def places(
    prediction: Prediction, valid: Tensor, block: int, index: tuple[Tensor, Tensor] | None = None
) -> RowPlaces:
    """The places of a prediction's valid rows.

    Args:
        prediction: of the student.
        valid: ``[B, R]`` bool.
        block: k.
        index: two ``[R']`` long, sequence and row of each valid row; None: in their order.
    """
    if index is None:
        sequences, rows = valid.nonzero(as_tuple=True)
        index = sequences, rows
    number, sequence = number_blocks(prediction.group)
    complete = complete_blocks(valid, number, sequence.shape[0], block)
    return RowPlaces(prediction.slot[index], number[index], complete, block)


def agreement(rows: LabelledRows) -> Tensor:
    """``[R']`` bool: the student's most likely token is the target's."""
    return rows.student_logits.argmax(-1) == rows.teacher_logits.argmax(-1)


def overlap(rows: LabelledRows) -> Tensor:
    """``[R']``: 1 - TV(p, q), the probability that speculative sampling accepts a token of q."""
    p, q = rows.teacher_logits.float().softmax(-1), rows.student_logits.float().softmax(-1)
    return torch.minimum(p, q).sum(-1)


def expected_length(accepted: Tensor, places: RowPlaces) -> Tensor:
    """``[G']``: 1 + Σ_j Π_{i≤j} accepted_i of each complete block, one pass's τ with the bonus.

    Args:
        accepted: ``[R']``, whether each row's token is accepted, or how likely.
        places: where the rows stand.
    """
    table = accepted.new_zeros(places.complete.shape[0], places.block, dtype=torch.float32)
    table[places.number, places.slot] = accepted.float()
    return 1 + table[places.complete].cumprod(1).sum(1)


def add_by_position(tally: Tally, key: str, values: Tensor, places: RowPlaces) -> None:
    """Count ``values`` ``[R']`` in by place in the block, 1..k; ``key`` has a ``{}`` for it."""
    for slot in range(places.block):
        tally.add(key.format(slot + 1), values[places.slot == slot].float())


def add_drafted(tally: Tally, agree: Tensor, accept: Tensor, places: RowPlaces) -> None:
    """Count in how much of its drafts would be kept.

    Args:
        tally: of the validation.
        agree: ``[R']`` bool, whether greedy decoding accepts the row's token.
        accept: ``[R']``, how likely sampling accepts it.
        places: where the rows stand.
    """
    tally.add("val/accept_rate", accept)
    add_by_position(tally, "val/position_{}/accept_rate", accept, places)
    add_by_position(tally, "val/position_{}/accuracy", agree, places)
    tally.add("val/expected_accept_length", expected_length(agree, places))
    tally.add("val/expected_accept_length_sampled", expected_length(accept, places))
