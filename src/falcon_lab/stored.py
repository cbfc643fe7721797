"""Read JSON files that somebody else may have written, cut off or edited.

They are data: nothing in them is interpolated, their size and depth are bounded, and their types
are checked field by field against a dataclass, by pydantic. Everything that touches pydantic is
here and in no other file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about

T = TypeVar("T")

LARGEST = 512 * 2**20
"""Bytes of a file that is read at once; no file of ours is near it."""


def read_json(path: Path, shape: type[T], what: str, advice: str) -> T:
    """Return the content of a file as ``shape``; keys that it does not know are left out.

    Args:
        path: the file.
        shape: a dataclass, or a type such as ``dict[str, Any]``.
        what: what the file should be, as in ``results of an evaluation``.
        advice: what to do about a file that is none.

    Raises:
        FalconLabError: the file is missing or unreadable, is no whole JSON (NaN, half characters
            and a nesting of more than 200 are none), or a field is of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    text = read_bounded(path)
    parse_json(text, f"{path}: no {what}", advice)
    try:
        return TypeAdapter(shape).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg']}" if field else first["msg"]
        reason = reason.replace("Input should be", "must be").replace("Field", "the field is")
        raise FalconLabError(f"{path}: no {what} ({reason}); {advice}") from error


def parse_json(text: bytes | str, where: str, advice: str) -> Any:
    """Return plain values from JSON.

    Args:
        text: UTF-8, with or without a byte order mark.
        where: begins the error: file and line, and what was looked for.
        advice: what to do about it.

    Raises:
        FalconLabError: it is no whole JSON.
    """
    from pydantic_core import from_json

    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise FalconLabError(f"{where} (not whole JSON: {error}); {advice}") from error


def read_bounded(path: Path) -> bytes:
    """Return a file's bytes without a byte order mark.

    Raises:
        FalconLabError: it cannot be read, or is larger than ``LARGEST``.
    """
    with about(path, "read"):
        if path.is_file() and path.stat().st_size > LARGEST:
            size = path.stat().st_size / 2**20
            raise FalconLabError(
                f"{path}: has {size:.0f} MiB, more than the {LARGEST // 2**20} that are read; "
                "name another file"
            )
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
