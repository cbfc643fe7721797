"""Teacher features on disk, computed once for many trainings on the same sequences.

Beside them is the target's most likely token after every position of the loss, which a training by
glances needs, and which would cost a product with the whole LM head in every step.

A folder of safetensors shards and an index that names the target and the sequences they belong to.
Shards are written under a temporary name and renamed, so that one with the right name is whole;
a build that was killed resumes with the first shard that is missing.

Shapes: N sequences, B batch, T tokens of a sequence, n rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from falcon_lab.config.schema import dtype_name
from falcon_lab.data.packing import PackedSequences
from falcon_lab.errors import FalconLabError
from falcon_lab.files import make_folder, write_atomically, write_whole
from falcon_lab.sampling import most_likely
from falcon_lab.stored import read_json

INDEX = "store.json"
ARGMAX = torch.int32
"""Of tokens in a shard."""
HEAD_ROWS = 256
"""Logits that are computed at a time."""
SHARD_BYTES = 2**28
"""A shard is about this large."""


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

    def head(self, features: Tensor) -> Tensor:
        """Compute logits ``[n, V]`` of ``[n, H]``."""
        ...


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """What a store has: fingerprints of target and data, and the shape of its features."""

    target: str
    data: str
    rows: int
    length: int
    hidden: int
    dtype: str
    shard_rows: int

    @property
    def shards(self) -> int:
        """Return the number of shards."""
        return -(-self.rows // self.shard_rows)

    def shard(self, number: int) -> range:
        """Return the numbers of the sequences of one shard."""
        start = number * self.shard_rows
        return range(start, min(start + self.shard_rows, self.rows))


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What is to be written to build a store.

    Attributes:
        folder: where.
        index: what it will hold.
        bytes: of the finished store.
        missing: shards that are still to be written.
        free: bytes free on that disk.
    """

    folder: Path
    index: StoreIndex
    bytes: int
    missing: tuple[int, ...]
    free: int

    @property
    def missing_bytes(self) -> int:
        """The bytes still to be written."""
        sequences = sum(len(self.index.shard(number)) for number in self.missing)
        return self.bytes // max(self.index.rows, 1) * sequences

    @property
    def sentence(self) -> str:
        """Describe the plan in one line for the user."""
        i = self.index
        whole = f"{i.rows} sequences x {i.length} tokens x {i.hidden} features in {i.dtype}"
        left = f"{size(self.missing_bytes)} to write, " if self.missing else "complete, "
        return f"feature store {self.folder}: {size(self.bytes)} ({whole}), {left}" + (
            f"{size(self.free)} free on the disk"
        )


def plan_store(
    folder: Path, sequences: PackedSequences, target: Teacher, *, shard_bytes: int = SHARD_BYTES
) -> StorePlan:
    """Compute the size of a store before anything is written.

    Raises:
        FalconLabError: the folder holds a store of another target or other data, or the disk has
            no room for what is missing.
    """
    width = torch.empty(0, dtype=target.dtype).element_size()
    sequence_bytes = sequences.length * (target.hidden_size * width + ARGMAX.itemsize)
    index = StoreIndex(
        target=target.fingerprint,
        data=sequences.fingerprint(),
        rows=len(sequences),
        length=sequences.length,
        hidden=target.hidden_size,
        dtype=dtype_name(target.dtype),
        shard_rows=max(1, shard_bytes // sequence_bytes),
    )
    if (folder / INDEX).exists():
        index = the_same(folder, read_index(folder), index)
    elif foreign := sorted(folder.glob(shard_path(folder, 0).name.replace("00000", "*"))):
        raise FalconLabError(
            f"{foreign[0]}: would be replaced, and belongs to no feature store ({INDEX} is missing "
            "beside it); choose another folder with data.feature_store, or move it"
        )
    missing = tuple(n for n in range(index.shards) if not shard_is_whole(folder, index, n))
    plan = StorePlan(folder, index, sequence_bytes * len(sequences), missing, free_bytes(folder))
    if plan.missing_bytes > plan.free:
        raise FalconLabError(
            f"{plan.sentence}: not enough room; free some, or set data.feature_store=null to "
            "compute the features on line"
        )
    return plan


def build_store(
    plan: StorePlan, sequences: PackedSequences, target: Teacher, *, batch_size: int = 8
) -> FeatureStore:
    """Write the missing shards, with a progress bar.

    Raises:
        FalconLabError: a shard cannot be written; what was there before is still there.
    """
    from falcon_lab.bars import Bar

    make_folder(plan.folder)
    if not (plan.folder / INDEX).exists():
        write_index(plan.folder, plan.index)
    total = sum(len(plan.index.shard(number)) for number in plan.missing)
    with Bar(total=total, desc="teacher features", unit="sequence") as bar:
        for number in plan.missing:
            features, tokens = [], []
            here = plan.index.shard(number)
            for start in range(here.start, here.stop, batch_size):
                batch = slice(start, min(start + batch_size, here.stop))
                read = _features(sequences, batch, target)
                features.append(read.cpu())
                tokens.append(_argmax(read, sequences.loss_mask[batch], target).cpu())
                bar.update(batch.stop - batch.start)
            write_shard(shard_path(plan.folder, number), torch.cat(features), torch.cat(tokens))
    return FeatureStore.open(plan.folder, target.fingerprint, sequences.fingerprint())


def _features(sequences: PackedSequences, batch: slice, target: Teacher) -> Tensor:
    packed = (sequences.tokens, sequences.documents, sequences.positions)
    tokens, documents, positions = (part[batch].long().to(target.device) for part in packed)
    return target.teacher(tokens, documents, positions).to(target.dtype)


@torch.no_grad()
def _argmax(features: Tensor, loss_mask: Tensor, target: Teacher) -> Tensor:
    """Return ``[B, T]`` int32: the most likely token where the next one is in the loss; else 0."""
    found = torch.zeros(features.shape[:2], dtype=ARGMAX, device=features.device)
    wanted = torch.zeros_like(loss_mask)
    wanted[:, :-1] = loss_mask[:, 1:]
    for place in wanted.flatten().nonzero()[:, 0].to(features.device).split(HEAD_ROWS):
        tokens = most_likely(target.head(features.flatten(0, 1)[place]))
        found.view(-1)[place] = tokens.to(ARGMAX)
    return found


class FeatureStore:
    """A finished store, read through memory maps.

    Raises:
        FalconLabError: from ``open``, when it belongs to another target or other data, or is not
            whole.
    """

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.folder, self.index = folder, index
        self._open: dict[int, Any] = {}

    @classmethod
    def open(cls, folder: Path, target: str, data: str) -> FeatureStore:
        """Open the store in ``folder`` for the given fingerprints of target and sequences."""
        index = read_index(folder)
        refuse_mismatch(folder, index, target=target, data=data)
        for number in range(index.shards):
            if not shard_is_whole(folder, index, number):
                raise FalconLabError(
                    f"{shard_path(folder, number)}: missing or damaged; run the training again "
                    "with the same data.feature_store, which writes it anew"
                )
        return cls(folder, index)

    def __getitem__(self, sequences: Sequence[int]) -> Tensor:
        """Return features ``[B, T, H]`` of the given sequences."""
        return torch.cat([self._sequence("features", sequence) for sequence in sequences])

    def argmax(self, sequences: Sequence[int]) -> Tensor:
        """Return ``[B, T]`` long, the most likely tokens of the given sequences."""
        return torch.cat([self._sequence("argmax", sequence) for sequence in sequences]).long()

    def _sequence(self, name: str, sequence: int) -> Tensor:
        from safetensors import safe_open

        shard, offset = divmod(sequence, self.index.shard_rows)
        if shard not in self._open:
            self._open[shard] = safe_open(shard_path(self.folder, shard), framework="pt")
        part: Tensor = self._open[shard].get_slice(name)[offset : offset + 1]
        return part

    def __getstate__(self) -> dict[str, Any]:
        # Maps do not travel to worker processes; each opens its own.
        return {"folder": self.folder, "index": self.index, "_open": {}}


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
    """Return whether a shard can be read and has the shape that the index gives."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard_path(folder, number), framework="pt") as file:
            features = file.get_slice("features")
            shape, dtype = features.get_shape(), features.get_dtype()
            tokens = file.get_slice("argmax").get_shape()
    except (OSError, SafetensorError):
        return False
    whole = [len(index.shard(number)), index.length, index.hidden]
    return [shape, tokens] == [whole, whole[:2]] and dtype == DTYPES.get(index.dtype)


DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16"}
"""Type of features -> its name in safetensors."""


def write_shard(path: Path, features: Tensor, argmax: Tensor) -> None:
    """Write one shard, complete or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {"features": features.contiguous(), "argmax": argmax.contiguous()}
    write_whole(path, lambda temporary: save_file(tensors, temporary), also=(SafetensorError,))


def write_index(folder: Path, index: StoreIndex) -> None:
    """Write the index, complete or not at all."""
    write_atomically(folder / INDEX, json.dumps(asdict(index), indent=2) + "\n")


def read_index(folder: Path) -> StoreIndex:
    """Read the index of a store.

    Raises:
        FalconLabError: there is none, or it is damaged.
    """
    advice = "choose another folder with data.feature_store, or delete this one"
    return read_json(folder / INDEX, StoreIndex, "index of a feature store", advice)


def the_same(folder: Path, index: StoreIndex, expected: StoreIndex) -> StoreIndex:
    """Return the index of a store whose features are those that are expected.

    Raises:
        FalconLabError: they are of another target or other data, or the index is damaged.
    """
    fields = ("target", "dtype", "data")
    refuse_mismatch(folder, index, **{name: getattr(expected, name) for name in fields})
    if index.shard_rows < 1 or replace(index, shard_rows=expected.shard_rows) != expected:
        raise FalconLabError(
            f"{folder / INDEX}: does not describe the features that it names; delete {folder} to "
            "compute them again"
        )
    return index


def refuse_mismatch(folder: Path, index: StoreIndex, **ours: str) -> None:
    """Raise when a store is of another target, in another precision, or of other sequences.

    Args:
        folder: of the store.
        index: what it says of itself.
        ours: fields of the index -> what this run has.
    """
    for name, expected in ours.items():
        if (theirs := getattr(index, name)) != expected:
            remedy = REMEDIES.get(name, "").format(theirs)
            raise FalconLabError(
                f"{folder}: these features were computed for {name} {theirs}, this run has {name} "
                f"{expected}; {remedy}choose another folder with data.feature_store"
            )


REMEDIES = {"dtype": "set target.dtype={}, or "}
"""Field of an index -> what else helps where it differs."""


def check_store(folder: Path, target: Teacher) -> None:
    """See that features in ``folder`` are the target's, before anything is computed.

    Raises:
        FalconLabError: they are not, or the index is damaged.
    """
    if (folder / INDEX).exists():
        index = read_index(folder)
        refuse_mismatch(folder, index, target=target.fingerprint, dtype=dtype_name(target.dtype))
