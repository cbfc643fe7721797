"""Read JSON files that somebody else may have written, cut off or edited.

They are data: nothing in them is interpolated, their size and depth are bounded, and their types
are checked field by field against a dataclass, by pydantic. Everything that touches pydantic is
here and in no other file.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

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
    return _read(path, shape, what, advice)[1]


def read_checked(path: Path, shape: type[Any], what: str, advice: str) -> dict[str, Any]:
    """Return the whole content of a file as plain values, when it holds what ``shape`` needs.

    Args:
        path: the file.
        shape: a dataclass.
        what: what the file should be.
        advice: what to do about a file that is none.

    Raises:
        FalconLabError: as ``read_json``.
    """
    content: dict[str, Any] = _read(path, shape, what, advice)[0]
    return content


def _read(path: Path, shape: type[T], what: str, advice: str) -> tuple[Any, T]:
    """Return the content of a file as plain values, and as ``shape``.

    It is parsed twice: pydantic's strict types know JSON's text, and no dataclass as a mapping; and
    beside the fields of a dataclass it lets anything pass.
    """
    from pydantic import ValidationError

    text, where = read_bounded(path), f"{path}: no {what}"
    content = parse_json(text, where, advice)
    try:
        return content, cast(T, _adapter(cast(Hashable, shape)).validate_json(text, strict=True))
    except ValidationError as error:
        raise FalconLabError(f"{where} ({_reason(error)}); {advice}") from error


def _reason(error: ValidationError) -> str:
    """Return the first field that is not as it should be, and why, in our words."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    reason = f"{field}: {first['msg']}" if field else first["msg"]
    return reason.replace("Input should be", "must be").replace("Field", "the field is")


def fitted(value: Any, shape: type[T], where: str, advice: str) -> T:
    """Return plain values, as of a line of JSON, as ``shape``; keys it does not know are left out.

    Args:
        value: the values.
        shape: a dataclass.
        where: begins the error: file and line, and what was looked for.
        advice: what to do about it.

    Raises:
        FalconLabError: a field is of another type, or half a character.
    """
    from pydantic import ValidationError
    from pydantic_core import to_json

    try:
        return cast(T, _adapter(cast(Hashable, shape)).validate_json(to_json(value), strict=True))
    except ValidationError as error:
        raise FalconLabError(f"{where} ({_reason(error)}); {advice}") from error
    except ValueError as error:
        raise FalconLabError(f"{where} (it holds half a character); {advice}") from error


def fitting(value: Any, shape: type[T]) -> T | None:
    """Return plain values, as of a line of JSON, as ``shape``; None where they are none."""
    try:
        return fitted(value, shape, "", "")
    except FalconLabError:
        return None


@cache
def _adapter(shape: Hashable) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cast(Any, shape))


def parse_json(text: bytes | str, where: str, advice: str, *, finite: bool = True) -> Any:
    """Return plain values from JSON.

    Args:
        text: UTF-8.
        where: begins the error: file and line, and what was looked for.
        advice: what to do about it.
        finite: refuse NaN and numbers that are beyond all bounds; programs that write figures
            beside texts write NaN.

    Raises:
        FalconLabError: it is no whole JSON.
    """
    from pydantic_core import from_json

    try:
        value = from_json(text, allow_inf_nan=not finite)
    except ValueError as error:
        reason = str(error)
        if "hex escape" in reason:
            reason += r": half a character, as \ud83d without its other half"
        if len(text.splitlines()) == 1:
            reason = reason.replace("at line 1 column", "at column")
        raise FalconLabError(f"{where} (not whole JSON: {reason}); {advice}") from error
    if finite and _endless(value):
        raise FalconLabError(f"{where} (a number is beyond all bounds); {advice}")
    return value


def _endless(value: Any) -> bool:
    """Return whether some number is infinite, as 1e999 is."""
    if isinstance(value, dict):
        return any(map(_endless, value.values()))
    if isinstance(value, list):
        return any(map(_endless, value))
    return isinstance(value, float) and not isfinite(value)


def read_bounded(path: Path, largest: int = LARGEST) -> bytes:
    """Return a file's bytes without a byte order mark.

    Raises:
        FalconLabError: it cannot be read, or is larger than ``largest``.
    """
    with about(path, "read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size if path.is_file() else largest
        content = file.read(min(size, largest) + 1)  # /dev/zero has no size and no end
    if len(content) > largest:
        raise FalconLabError(
            f"{path}: has more than the {largest // 2**20} MiB that are read; name another file"
        )
    return content.removeprefix(b"\xef\xbb\xbf")
