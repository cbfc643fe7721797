"""What a feature store has: its target, sequences and layers, and the precision that it keeps.

Shapes: T tokens of a sequence, L kept layers, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from falcon_lab.config.schema import FEATURE_DTYPES, dtype_name
from falcon_lab.errors import FalconLabError
from falcon_lab.files import write_atomically
from falcon_lab.stored import read_json

INDEX = "store.json"
FEATURES, ARGMAX = "features", "argmax"
"""Names of tensors in a shard."""
TOKENS, SCALE = torch.int32, torch.float32
"""Of likeliest tokens in a shard, and of what a row of values was divided by."""
OWN = {
    dtype_name(dtype): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
"""What an index calls a target's precision."""
KEPT = {"float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn}
"""What ``data.feature_store_dtype`` calls a dtype that is not the target's own."""
ELSEWHERE = "choose another folder with data.feature_store"


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """What a store has.

    Attributes:
        target: the fingerprint.
        data: the fingerprint of the sequences.
        rows: how many of these.
        length: T.
        hidden: H.
        dtype: the target's.
        shard_rows: sequences of a shard.
        taps: layers whose hidden states stand beside the features, in ascending order.
        kept: one of ``FEATURE_DTYPES``.
        errors: of a finished store that is not in the target's own precision: tensor -> length of
            a position's error over that of its state, as a root mean square over all positions.
    """

    target: str
    data: str
    rows: int
    length: int
    hidden: int
    dtype: str
    shard_rows: int
    taps: tuple[int, ...] = ()
    kept: str = FEATURE_DTYPES[0]
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        """Return the number of shards."""
        return -(-self.rows // self.shard_rows)

    def shard(self, number: int) -> range:
        """Return the numbers of the sequences of one shard."""
        start = number * self.shard_rows
        return range(start, min(start + self.shard_rows, self.rows))

    @property
    def values(self) -> tuple[str, ...]:
        """Return the names of the tensors with a state of the target at every position."""
        return FEATURES, *map(tap_name, self.taps)

    @property
    def value_dtype(self) -> torch.dtype:
        """Return what they are kept in."""
        return KEPT.get(self.kept) or self.own_dtype

    @property
    def own_dtype(self) -> torch.dtype:
        """Return what the target computes in."""
        return OWN[self.dtype]

    @property
    def is_exact(self) -> bool:
        """Return whether that is the target's own precision."""
        return self.kept not in KEPT

    def tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield name, dtype and shape of what a shard has of each sequence."""
        yield ARGMAX, TOKENS, (self.length,)
        for name in self.values:
            yield name, self.value_dtype, (self.length, self.hidden)
            if not self.is_exact:
                yield scale_name(name), SCALE, (self.length,)

    @property
    def sequence_bytes(self) -> int:
        """Return the bytes of one sequence."""
        sizes = (torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in self.tensors())
        return sum(sizes)

    @property
    def sentence(self) -> str:
        """Describe what is kept."""
        beside = f" and the states of {layers(self.taps)}" if self.taps else ""
        kept = self.dtype if self.is_exact else f"{self.kept} with a scale a position"
        return (
            f"{self.rows} sequences x {self.length} tokens x {self.hidden} features{beside} in "
            f"{kept}"
        )

    @property
    def error_sentence(self) -> str:
        """Say how far what is kept is from what the target computed."""
        each = (f"{error:.2%} of {name}" for name, error in self.errors.items())
        return f"kept in {self.kept}, with a relative error of {', '.join(each)} (root mean square)"


def tap_name(layer: int) -> str:
    """Return the name of the tensor of a layer's states."""
    return f"taps.{layer}"


def scale_name(name: str) -> str:
    """Return the name of the tensor of what the rows of another were divided by."""
    return f"{name}.scale"


def layers(numbers: Iterable[int]) -> str:
    """Return layers in words."""
    listed = ", ".join(map(str, numbers))
    return f"layers {listed}" if "," in listed else f"layer {listed}" if listed else "no layer"


def kept_as(kept: str, dtype: torch.dtype) -> str:
    """Return how a store of a target of that dtype is kept: its own precision is ``auto``."""
    return FEATURE_DTYPES[0] if KEPT.get(kept) == dtype else kept


# --- the file -----------------------------------------------------------------------------------


def write_index(folder: Path, index: StoreIndex) -> None:
    """Write the index, complete or not at all."""
    write_atomically(folder / INDEX, json.dumps(asdict(index), indent=2) + "\n")


def read_index(folder: Path) -> StoreIndex:
    """Read the index of a store.

    Raises:
        FalconLabError: there is none, or it is damaged.
    """
    advice = f"{ELSEWHERE}, or delete this one"
    index = read_json(folder / INDEX, StoreIndex, "index of a feature store", advice)
    for name, words in (("dtype", OWN), ("kept", FEATURE_DTYPES)):
        if (found := getattr(index, name)) not in words:
            raise FalconLabError(
                f"{folder / INDEX}: no index of a feature store ({name} is {found!r:.40}); {advice}"
            )
    return index


def the_same(folder: Path, index: StoreIndex, expected: StoreIndex) -> StoreIndex:
    """Return the index of a store that has what is expected, and may have more layers.

    Raises:
        FalconLabError: it is of another target or other data, or lacks a layer, or the index is
            damaged.
    """
    fields = ("target", "dtype", "kept", "data")
    refuse_mismatch(folder, index, **{name: getattr(expected, name) for name in fields})
    refuse_other_layers(folder, index, expected.taps)
    free = {name: getattr(expected, name) for name in ("shard_rows", "taps", "errors")}
    ordered = tuple(sorted({layer for layer in index.taps if layer >= 0})) == index.taps
    if index.shard_rows < 1 or not ordered or replace(index, **free) != expected:
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
            word, remedy = WORDS.get(name, (name, ""))
            raise FalconLabError(
                f"{folder}: these features were computed for {word} {theirs:.60}, this run has "
                f"{word} {expected}; {remedy.format(theirs)}{ELSEWHERE}"
            )


WORDS = {
    "dtype": ("dtype", "set target.dtype={}, or "),
    "kept": ("feature_store_dtype", "set data.feature_store_dtype={}, or "),
}
"""Field of an index -> what it is called, and what else helps where it differs."""


def refuse_other_layers(folder: Path, index: StoreIndex, wanted: Iterable[int]) -> None:
    """Raise when a store lacks the states of a layer."""
    if missing := sorted(set(wanted) - set(index.taps)):
        raise FalconLabError(
            f"{folder}: has the states of {layers(index.taps)}, and {layers(missing)} are wanted "
            f"too; {ELSEWHERE}, or set data.feature_store=null to compute them on line"
        )
