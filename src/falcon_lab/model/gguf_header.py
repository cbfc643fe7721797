"""Read the header of a GGUF file, which somebody else may have written, cut off or edited.

A GGUF file is a header (values by key, and the names, shapes and types of all tensors) and the
tensors' data. Libraries that read it believe what it says; here every length is held against the
file's before anything is taken.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}
"""Type of a value -> its form in ``struct``."""
TEXT, ARRAY = 8, 9

LONGEST_TEXT = 2**26
"""Bytes of a single text; chat templates are the longest, and have some thousands."""
MOST_AXES = 8
"""Axes of a tensor; GGML has four."""

FETCH = "fetch it again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header says of one tensor.

    Attributes:
        name: as GGUF calls it.
        shape: the fastest axis first.
        kind: the number of its type.
        offset: of its data, from where the data of all begin.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        """Return the number of weights."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file.

    Attributes:
        path: of the file.
        values: by key; an array is its length.
        tensors: in the file's order.
        start: of the tensors' data in the file.
        size: of the file, in bytes.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    start: int
    size: int

    @property
    def architecture(self) -> str:
        """Return the family, as GGUF calls it."""
        return str(self.values["general.architecture"])

    @property
    def elements(self) -> int:
        """Return the number of weights in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def is_gguf(name: str) -> bool:
    """Return whether a target's name is that of a GGUF file, which may be missing.

    Raises:
        FalconLabError: no file can have the name, or the file cannot be read.
    """
    path = Path(name)
    with about(path, "read"):
        if path.is_dir():
            return False
        if path.suffix.lower() == ".gguf":
            return True
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file, and nothing of its tensors' data.

    Raises:
        FalconLabError: it cannot be read, is no GGUF file, is cut off or damaged, or is one part of
            several.
    """
    with about(path, "read"), path.open("rb") as file:
        first = file.read(len(MAGIC))
        if first != MAGIC:
            begins = f"begins with {first!r}" if first else "is empty"
            raise FalconLabError(f"{path}: is no GGUF file (it {begins}); {FETCH}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()


class _Reader:
    """Takes one thing after another from a file's bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, len(MAGIC)

    def header(self) -> GGUFHeader:
        version = self._take("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise FalconLabError(
                f"{self._path}: is of GGUF's version {version}, and {known} can be read; convert "
                "the model again with a current llama.cpp"
            )
        tensors, pairs = self._take("Q"), self._take("Q")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in values:
                raise self._damaged(f"it has {key!r} twice")
            values[key] = self._value(self._take("I"))
        entries = tuple(self._tensor() for _ in range(tensors))
        self._check(values, entries)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"its tensors are aligned by {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(self._path, values, entries, start, len(self._data))

    def _check(self, values: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> None:
        """Refuse what is whole and no model, or claims more than it has."""
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str) or not tensors:
            missing = "tensors" if isinstance(architecture, str) else "general.architecture"
            raise FalconLabError(f"{self._path}: is no language model (it has no {missing})")
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise self._damaged("it has two tensors of one name")
        parts = values.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise FalconLabError(
                f"{self._path}: is one of {parts} parts; merge them with llama.cpp's "
                "llama-gguf-split --merge, and name the whole file"
            )
        layers, claimed = len(tensors), values.get(f"{architecture}.block_count", 0)
        if not isinstance(claimed, int) or claimed > layers:
            raise self._damaged(f"it speaks of {claimed!r} layers and has {layers} tensors")

    def _tensor(self) -> TensorEntry:
        name, axes = self._text(), self._take("I")
        if axes > MOST_AXES:
            raise self._damaged(f"tensor {name!r} has {axes} axes")
        shape = tuple(self._take("Q") for _ in range(axes))
        return TensorEntry(name, shape, self._take("I"), self._take("Q"))

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._take(SCALARS[kind])
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            raise self._damaged(f"a value is of type {kind}")
        inner, length = self._take("I"), self._take("Q")
        if inner in SCALARS:
            self._skip(length * struct.calcsize(SCALARS[inner]))
        elif inner == TEXT:
            for _ in range(length):
                self._skip(self._take("Q"))
        else:
            raise self._damaged(f"an array is of type {inner}")
        return length

    def _text(self) -> str:
        length = self._take("Q")
        if length > LONGEST_TEXT:
            raise self._damaged(f"a text of {length} bytes at byte {self._at}")
        start = self._at
        self._skip(length)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"no UTF-8 at byte {start + error.start}") from error

    def _take(self, form: str) -> Any:
        start = self._at
        self._skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._data, start)[0]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise cut_off(self._path, len(self._data), None)

    def _damaged(self, what: str) -> FalconLabError:
        return FalconLabError(f"{self._path}: is damaged: {what}; {FETCH}")


def cut_off(path: Path, size: int, whole: int | None) -> FalconLabError:
    """Return the error about a file of ``size`` bytes that should have more.

    Args:
        path: of the file.
        size: in bytes.
        whole: what it should be; None: that is not known, as the header is not whole.
    """
    found = f"its header goes on behind its {size} bytes"
    if whole is not None:
        found = f"{size} of {whole} bytes are there"
    return FalconLabError(f"{path}: is cut off or damaged, {found}; {FETCH}")
