"""Teacher features on disk, computed once for many trainings on the same sequences.

Beside them are the states of the layers that a drafter taps, and the target's most likely token
after every position of the loss, which a training by glances needs, and which would cost a product
with the whole LM head in every step.

A folder of safetensors shards and an index (``feature_index.py``). Shards are written under a
temporary name and renamed, so that one with the right name is whole: it is never written again. A
build that was killed resumes with the first shard that is missing, and several processes may build
one store together: each writes what no other is at.

Shapes: N sequences, B batch, T tokens of a sequence, n rows, L tapped layers, H hidden,
V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from falcon_lab.config.schema import FEATURE_DTYPES, dtype_name
from falcon_lab.data.feature_index import (
    ARGMAX,
    FEATURES,
    INDEX,
    TOKENS,
    StoreIndex,
    kept_as,
    read_index,
    refuse_mismatch,
    refuse_other_layers,
    scale_name,
    tap_name,
    the_same,
    write_index,
)
from falcon_lab.data.packing import PackedSequences
from falcon_lab.data.row_scaling import Deviation, scaled, unscaled
from falcon_lab.errors import FalconLabError
from falcon_lab.files import claimed, make_folder, write_whole
from falcon_lab.sampling import most_likely
from falcon_lab.stored import fitting

HEAD_ROWS = 256
"""Logits that are computed at a time."""
SHARD_BYTES = 2**28
"""A shard is about this large."""
ERRORS = "errors"
"""Key of a shard's metadata: how far its tensors are from what the target computed."""
SAFETENSORS = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
}
"""Dtype -> its name in a shard."""


class Teacher(Protocol):
    """The target, as far as the store needs it."""

    fingerprint: str
    hidden_size: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the features."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the target's device."""
        ...

    def teacher(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Compute features ``[B, T, H]`` of ``[B, T]`` long each."""
        ...

    def tapped(self, layers: Sequence[int]) -> Self:
        """Return the same, whose ``tapped_teacher`` gives the states of some layers."""
        ...

    def tapped_teacher(
        self, tokens: Tensor, documents: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute features, and ``[B, T, L, H]`` of the layers."""
        ...

    def head(self, features: Tensor) -> Tensor:
        """Compute logits ``[n, V]`` of ``[n, H]``."""
        ...


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What is to be written to build a store.

    Attributes:
        folder: where.
        index: what it will hold.
        missing: shards that are still to be written.
        free: bytes free on that disk.
    """

    folder: Path
    index: StoreIndex
    missing: tuple[int, ...]
    free: int

    @property
    def bytes(self) -> int:
        """Return the bytes of the finished store."""
        return self.index.sequence_bytes * self.index.rows

    @property
    def missing_bytes(self) -> int:
        """Return the bytes still to be written."""
        sequences = sum(len(self.index.shard(number)) for number in self.missing)
        return self.index.sequence_bytes * sequences

    @property
    def sentence(self) -> str:
        """Describe the plan in one line for the user."""
        left = f"{size(self.missing_bytes)} to write, " if self.missing else "complete, "
        return (
            f"feature store {self.folder}: {size(self.bytes)} ({self.index.sentence}), {left}"
            f"{size(self.free)} free on the disk"
        )


def plan_store(
    folder: Path,
    sequences: PackedSequences,
    target: Teacher,
    *,
    taps: Iterable[int] = (),
    kept: str = FEATURE_DTYPES[0],
    shard_bytes: int | None = None,
) -> StorePlan:
    """Compute the size of a store before anything is written.

    Args:
        folder: where.
        sequences: what is read.
        target: who reads it.
        taps: layers whose states are wanted; a store that is there may have more.
        kept: ``auto`` (the target's own precision) or another of ``FEATURE_DTYPES``.
        shard_bytes: how large a shard is, about; None is ``SHARD_BYTES``.

    Raises:
        FalconLabError: the folder holds a store of another target, other data, other layers or
            another precision, or the disk has no room for what is missing.
    """
    index = StoreIndex(
        target=target.fingerprint,
        data=sequences.fingerprint(),
        rows=len(sequences),
        length=sequences.length,
        hidden=target.hidden_size,
        dtype=dtype_name(target.dtype),
        shard_rows=1,
        taps=tuple(sorted(set(taps))),
        kept=kept_as(kept, target.dtype),
    )
    index = replace(index, shard_rows=max(1, (shard_bytes or SHARD_BYTES) // index.sequence_bytes))
    if (folder / INDEX).exists():
        index = the_same(folder, read_index(folder), index)
    elif foreign := sorted(folder.glob(shard_path(folder, 0).name.replace("00000", "*"))):
        raise FalconLabError(
            f"{foreign[0]}: would be replaced, and belongs to no feature store ({INDEX} is missing "
            "beside it); choose another folder with data.feature_store, or move it"
        )
    missing = tuple(n for n in range(index.shards) if not shard_is_whole(folder, index, n))
    plan = StorePlan(folder, index, missing, free_bytes(folder))
    if plan.missing_bytes > plan.free:
        raise FalconLabError(
            f"{plan.sentence}: not enough room; free some, or set data.feature_store=null to "
            "compute the features on line"
        )
    return plan


def build_store(
    plan: StorePlan,
    sequences: PackedSequences,
    target: Teacher,
    *,
    taps: Sequence[int] = (),
    batch_size: int = 8,
) -> FeatureStore:
    """Write the missing shards, with a progress bar, and open the store.

    Args:
        plan: what is to be written.
        sequences: what is read.
        target: who reads it.
        taps: layers whose states are read from the store.
        batch_size: sequences that are read at a time.

    Raises:
        FalconLabError: a shard cannot be written; what was there before is still there.
    """
    from falcon_lab.bars import Bar

    begin_store(plan)

    def write(number: int, *, wait: bool, bar: Bar) -> bool:
        """Write a shard unless it is there; return whether it is there then."""
        return write_shard(
            plan, sequences, target, number, batch_size=batch_size, wait=wait, progress=bar.update
        )

    total = sum(len(plan.index.shard(number)) for number in plan.missing)
    with Bar(total=total, desc="teacher features", unit="sequence") as bar:
        # First what no other process is at; then what another one has left undone.
        left = [number for number in plan.missing if not write(number, wait=False, bar=bar)]
        for number in left:
            write(number, wait=True, bar=bar)
    if not plan.index.is_exact and (plan.missing or not plan.index.errors):
        write_index(plan.folder, replace(plan.index, errors=_errors(plan.folder, plan.index)))
    return FeatureStore.open(plan.folder, target.fingerprint, sequences.fingerprint(), taps)


def begin_store(plan: StorePlan) -> None:
    """Make the folder and its index, unless they are there.

    Raises:
        FalconLabError: they cannot be written.
    """
    make_folder(plan.folder)
    if not (plan.folder / INDEX).exists():
        write_index(plan.folder, plan.index)


def write_shard(
    plan: StorePlan,
    sequences: PackedSequences,
    target: Teacher,
    number: int,
    *,
    batch_size: int,
    wait: bool = True,
    progress: Callable[[int], object] = lambda count: None,
) -> bool:
    """Write a shard unless it is there, or another process is at it.

    Args:
        plan: of the store.
        sequences: what is read.
        target: who reads it.
        number: of the shard.
        batch_size: sequences that are read at a time.
        wait: for the other process, whose shard may be left undone.
        progress: is called with the number of sequences that are there now.

    Returns:
        Whether it is there then.

    Raises:
        FalconLabError: it cannot be written; what was there before is still there.
    """
    path, here = shard_path(plan.folder, number), plan.index.shard(number)
    with claimed(path.with_suffix(".lock"), wait=wait) as mine:
        if not mine:
            return False
        if shard_is_whole(plan.folder, plan.index, number):
            progress(len(here))
            return True
        shard = Shard(plan.index)
        for start in range(here.start, here.stop, batch_size):
            batch = slice(start, min(start + batch_size, here.stop))
            shard.append(_states(sequences, batch, target, plan.index))
            progress(batch.stop - batch.start)
        shard.write(path)
    return True


def _states(
    sequences: PackedSequences, batch: slice, target: Teacher, index: StoreIndex
) -> dict[str, Tensor]:
    """Return what the target computes of some sequences, by the names of a shard."""
    packed = (sequences.tokens, sequences.documents, sequences.positions)
    read = [part[batch].long().to(target.device) for part in packed]
    if not index.taps:
        found = {FEATURES: target.teacher(*read).to(target.dtype)}
    else:
        features, states = target.tapped(index.taps).tapped_teacher(*read)
        values = (features, *states.unbind(2))
        found = {
            name: each.to(target.dtype) for name, each in zip(index.values, values, strict=True)
        }
    return found | {ARGMAX: _argmax(found[FEATURES], sequences.loss_mask[batch], target)}


@torch.no_grad()
def _argmax(features: Tensor, loss_mask: Tensor, target: Teacher) -> Tensor:
    """Return ``[B, T]`` int32: the most likely token where the next one is in the loss; else 0."""
    found = torch.zeros(features.shape[:2], dtype=TOKENS, device=features.device)
    wanted = torch.zeros_like(loss_mask)
    wanted[:, :-1] = loss_mask[:, 1:]
    for place in wanted.flatten().nonzero()[:, 0].to(features.device).split(HEAD_ROWS):
        tokens = most_likely(target.head(features.flatten(0, 1)[place]))
        found.view(-1)[place] = tokens.to(TOKENS)
    return found


class Shard:
    """A shard that is being computed.

    Args:
        index: of its store.
    """

    def __init__(self, index: StoreIndex) -> None:
        self.index = index
        self._parts: dict[str, list[Tensor]] = {}
        self._deviations: dict[str, Deviation] = {}

    def append(self, states: Mapping[str, Tensor]) -> None:
        """Append what the target computed of some sequences, as it is kept."""
        for name, values in states.items():
            if name == ARGMAX or self.index.is_exact:
                self._parts.setdefault(name, []).append(values.cpu())
                continue
            kept, scale = scaled(values, self.index.value_dtype)
            known = self._deviations.get(name, Deviation())
            exact = unscaled(kept, scale, torch.float32)
            self._deviations[name] = known + Deviation.of(exact, values)
            self._parts.setdefault(name, []).append(kept.cpu())
            self._parts.setdefault(scale_name(name), []).append(scale.cpu())

    def write(self, path: Path) -> None:
        """Write it, complete or not at all.

        Raises:
            FalconLabError: it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {name: torch.cat(parts) for name, parts in self._parts.items()}
        sums = {name: [each.squares, each.rows] for name, each in self._deviations.items()}
        metadata = {ERRORS: json.dumps(sums)} if sums else None
        write_whole(
            path,
            lambda temporary: save_file(tensors, temporary, metadata),
            also=(SafetensorError,),
        )


def _errors(folder: Path, index: StoreIndex) -> dict[str, float]:
    """Return how far every tensor of a finished store is from what the target computed."""
    from safetensors import safe_open

    found: dict[str, list[Deviation]] = {name: [] for name in index.values}
    for number in range(index.shards):
        with safe_open(shard_path(folder, number), framework="pt") as file:
            sums = json.loads((file.metadata() or {}).get(ERRORS, "{}"))
        for name, (squares, rows) in (fitting(sums, dict[str, tuple[float, int]]) or {}).items():
            if name in found:
                found[name].append(Deviation(squares, rows))
    return {name: reduce(add, parts, Deviation()).root_mean_square for name, parts in found.items()}


class FeatureStore:
    """A finished store, read through memory maps.

    Args:
        folder: where it is.
        index: what it has.
        layers: whose states are read from it.

    Raises:
        FalconLabError: from ``open``, when it belongs to another target or other data, or is not
            whole.
    """

    def __init__(self, folder: Path, index: StoreIndex, layers: Sequence[int] = ()) -> None:
        self.folder, self.index, self.layers = folder, index, tuple(layers)
        self._open: dict[int, Any] = {}

    @classmethod
    def open(cls, folder: Path, target: str, data: str, layers: Sequence[int] = ()) -> FeatureStore:
        """Open the store in ``folder`` for the given fingerprints of target and sequences."""
        index = read_index(folder)
        refuse_mismatch(folder, index, target=target, data=data)
        refuse_other_layers(folder, index, layers)
        for number in range(index.shards):
            if not shard_is_whole(folder, index, number):
                raise FalconLabError(
                    f"{shard_path(folder, number)}: missing or damaged; run the training again "
                    "with the same data.feature_store, which writes it anew"
                )
        return cls(folder, index, layers)

    def __getitem__(self, sequences: Sequence[int]) -> Tensor:
        """Return features ``[B, T, H]`` of the given sequences."""
        return self._values(FEATURES, sequences)

    def taps(self, sequences: Sequence[int]) -> Tensor | None:
        """Return ``[B, T, L, H]``, the states of the layers; None where none are read."""
        if not self.layers:
            return None
        found = [self._values(tap_name(layer), sequences) for layer in self.layers]
        return torch.stack(found, dim=2)

    def argmax(self, sequences: Sequence[int]) -> Tensor:
        """Return ``[B, T]`` long, the most likely tokens of the given sequences."""
        return self._read(ARGMAX, sequences).long()

    def _values(self, name: str, sequences: Sequence[int]) -> Tensor:
        values = self._read(name, sequences)
        if self.index.is_exact:
            return values
        return unscaled(values, self._read(scale_name(name), sequences), self.index.own_dtype)

    def _read(self, name: str, sequences: Sequence[int]) -> Tensor:
        return torch.cat(list(self._sequences(name, sequences)))

    def _sequences(self, name: str, sequences: Sequence[int]) -> Iterator[Tensor]:
        from safetensors import safe_open

        for sequence in sequences:
            shard, offset = divmod(sequence, self.index.shard_rows)
            if shard not in self._open:
                self._open[shard] = safe_open(shard_path(self.folder, shard), framework="pt")
            yield self._open[shard].get_slice(name)[offset : offset + 1]

    def __getstate__(self) -> dict[str, Any]:
        # Maps do not travel to worker processes; each opens its own.
        return {"folder": self.folder, "index": self.index, "layers": self.layers, "_open": {}}


def size(count: int) -> str:
    """Return a number of bytes with its unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that ``folder`` is or will be on."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of one shard."""
    return folder / f"features-{number:05d}.safetensors"


def shard_is_whole(folder: Path, index: StoreIndex, number: int) -> bool:
    """Return whether a shard can be read and has what the index says."""
    from safetensors import SafetensorError, safe_open

    rows = len(index.shard(number))
    expected = {
        name: ([rows, *shape], SAFETENSORS[dtype]) for name, dtype, shape in index.tensors()
    }
    try:
        with safe_open(shard_path(folder, number), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in expected}
            found = {name: (each.get_shape(), each.get_dtype()) for name, each in slices.items()}
    except (OSError, SafetensorError):
        return False
    return found == expected


def check_store(
    folder: Path,
    target: Teacher,
    *,
    taps: Iterable[int] = (),
    kept: str = FEATURE_DTYPES[0],
) -> None:
    """See that features in ``folder`` are the target's, before anything is computed.

    Args:
        folder: of the store, which need not be there.
        target: who reads the sequences.
        taps: layers whose states are wanted.
        kept: one of ``FEATURE_DTYPES``.

    Raises:
        FalconLabError: they are not, or the index is damaged.
    """
    if (folder / INDEX).exists():
        index, dtype = read_index(folder), dtype_name(target.dtype)
        ours = {"target": target.fingerprint, "dtype": dtype, "kept": kept_as(kept, target.dtype)}
        refuse_mismatch(folder, index, **ours)
        refuse_other_layers(folder, index, taps)
