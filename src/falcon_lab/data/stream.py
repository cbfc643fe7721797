"""Batches by number: which sequences batch n has follows from n and the seed alone.

So a run that resumes at batch n sees what an uninterrupted one would have seen, and the processes
of a distributed run share the batches without sharing a sequence.

Shapes: N sequences, B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from falcon_lab.data.feature_store import FeatureStore
from falcon_lab.data.packing import PADDING, Batch, PackedSequences
from falcon_lab.errors import FalconLabError


def make_batch(
    sequences: PackedSequences, numbers: Tensor, index: int, features: FeatureStore | None = None
) -> Batch:
    """Return the sequences ``numbers`` ``[B]``; number -1 is a sequence of padding alone."""
    there = numbers >= 0
    chosen = numbers.clamp(min=0)
    real = there[:, None]
    batch = Batch(
        tokens=sequences.tokens[chosen].long() * real,
        loss_mask=sequences.loss_mask[chosen] & real,
        documents=torch.where(real, sequences.documents[chosen].long(), PADDING),
        positions=sequences.positions[chosen].long() * real,
        index=torch.tensor(index),
    )
    if features is None:
        return batch
    rows = chosen.tolist()
    return batch._replace(
        features=features[rows], argmax=features.argmax(rows), taps=features.taps(rows)
    )


class Batches(Dataset[Batch]):
    """Batch n of an endless pass over the sequences, shuffled anew in every epoch.

    Number g of the pass is sequence ``permutation(seed, g // N)[g % N]``, and batch n takes the
    numbers from n·B on, so that a batch may reach into the next epoch and none is short.

    Args:
        sequences: what to draw from.
        batch_size: B.
        seed: of the order.
        features: teacher features of the sequences, or None.
    """

    def __init__(
        self,
        sequences: PackedSequences,
        batch_size: int,
        seed: int,
        features: FeatureStore | None = None,
    ) -> None:
        self.sequences, self.batch_size, self.seed, self.features = (
            sequences,
            batch_size,
            seed,
            features,
        )
        self._epochs: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Batch:
        first = number * self.batch_size
        sequences = [self._sequence(place) for place in range(first, first + self.batch_size)]
        return make_batch(self.sequences, torch.tensor(sequences), number, self.features)

    def _sequence(self, place: int) -> int:
        epoch, offset = divmod(place, len(self.sequences))
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.sequences), generator=generator)
            # A batch needs two epochs at the most, unless it holds all sequences several times.
            self._epochs = {**dict(list(self._epochs.items())[-3:]), epoch: order}
        return int(self._epochs[epoch][offset])


@dataclass(frozen=True, slots=True)
class Share:
    """The rank of this process among ``world`` of them."""

    rank: int = 0
    world: int = 1


class BatchStream:
    """One process's batches: numbers rank, rank + world, rank + 2·world, …

    Lightning stores ``state_dict`` in its checkpoints and restores it on resuming.

    Args:
        batches: all batches.
        length: batches that this process has between one ``iter`` and its end.
        share: which process this is.
        workers: processes that prepare batches ahead.
    """

    def __init__(
        self, batches: Batches, length: int, share: Share | None = None, workers: int = 0
    ) -> None:
        self.batches, self.length, self.workers = batches, length, workers
        self.share = share or Share()
        self._taken = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        # One that ended begins the next pass; one that was restored continues its own.
        end = (self._taken // self.length + 1) * self.length
        rank, world = self.share.rank, self.share.world
        loader: Any = DataLoader(
            self.batches,
            batch_size=None,
            sampler=range(self._taken * world + rank, end * world, world),
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # the global one is not to be drawn from
        )
        for batch in loader:
            self._taken += 1  # before the batch is used: a checkpoint then holds it as seen
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return how many batches all processes took together, and of which size."""
        return {
            "batches": self._taken * self.share.world,
            "batch_size": self.batches.batch_size,
            "rows": len(self.batches.sequences),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume where ``state`` stopped.

        Raises:
            FalconLabError: the checkpoint is of other data or another number of processes.
        """
        now = self.state_dict()
        for key, what in (
            ("batch_size", "a batch size of"),
            ("rows", "packed sequences numbering"),
        ):
            if state[key] != now[key]:
                raise FalconLabError(
                    f"the checkpoint was trained with {what} {state[key]}, this run has "
                    f"{now[key]}; restore the settings of data, or train in another folder"
                )
        taken, rest = divmod(state["batches"], self.share.world)
        if rest:
            raise FalconLabError(
                f"the checkpoint stands at batch {state['batches']}, which {self.share.world} "
                "processes cannot share evenly; resume with as many processes as before"
            )
        self._taken = taken


class ValidationBatches:
    """The sequences in their order, the same number of batches in every process.

    Where they do not divide evenly, sequences of padding alone fill up; these count for nothing.
    """

    def __init__(
        self,
        sequences: PackedSequences,
        batch_size: int,
        share: Share | None = None,
        features: FeatureStore | None = None,
    ) -> None:
        self.sequences, self.batch_size, self.features = sequences, batch_size, features
        share = share or Share()
        mine = torch.arange(len(sequences))[share.rank :: share.world]
        wanted = -(-len(sequences) // share.world)
        fill = torch.full((wanted - len(mine),), -1)
        self._numbers = torch.cat([mine, fill]).split(batch_size)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        for index, numbers in enumerate(self._numbers):
            yield make_batch(self.sequences, numbers, index, self.features)
