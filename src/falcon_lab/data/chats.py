"""Samples of a JSONL file: chats in the three layouts that are in use, or plain texts.

``{"messages": [{"role", "content"}]}`` (OpenAI), ``{"conversations": [{"role", "content"}]}``,
``{"conversations": [{"from", "value"}]}`` (ShareGPT) and ``{"text": …}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError

Messages = list[dict[str, Any]]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Speakers of either layout, and the role that a chat template knows."""


def read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """``(line number, object)`` of every line that is not blank.

    Raises:
        FalconLabError: for a line that is no JSON object, naming file, line and fault.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise FalconLabError(f"{file}: {error.strerror or error}") from error
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            # A byte-order mark may stand before the first line.
            value = json.loads(raw.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise FalconLabError(f"{file}:{number}: not UTF-8 ({error.reason})") from None
        except json.JSONDecodeError as error:
            raise FalconLabError(
                f"{file}:{number}: not JSON ({error.msg} at column {error.colno})"
            ) from None
        if not isinstance(value, dict):
            raise FalconLabError(f"{file}:{number}: a JSON object is needed, found {kind(value)}")
        yield number, value


def read_samples(file: Path) -> Iterator[tuple[int, str, str | Messages]]:
    """``(line number, key, text or messages)`` of every sample; the key is its id or its line.

    Raises:
        FalconLabError: naming file, line and fault.
    """
    seen: set[str] = set()
    for number, value in read_jsonl(file):
        key = str(value.get("id", number))
        if key in seen:  # collections put together from parts repeat their ids
            key = f"{key}@{number}"
        seen.add(key)
        try:
            yield number, key, _sample(value)
        except ValueError as error:
            raise FalconLabError(f"{file}:{number}: {error}") from None


def _sample(value: dict[str, Any]) -> str | Messages:
    if isinstance(text := value.get("text"), str):
        return text
    turns = value.get("messages", value.get("conversations"))
    if turns is None:
        keys = ", ".join(value) or "none"
        raise ValueError(f"no messages, conversations or text among its keys ({keys})")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a list of messages is needed, found {kind(turns)}")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"message {number} is {kind(turn)}, not an object")
    speaker, said = ("from", "value") if "from" in turn else ("role", "content")
    for key in (speaker, said):
        if key not in turn:
            raise ValueError(f"message {number} has no {key!r}")
    role = ROLES.get(turn[speaker]) if isinstance(turn[speaker], str) else None
    if role is None:
        known = ", ".join(sorted(ROLES))
        raise ValueError(f"message {number} is by {turn[speaker]!r}; known are {known}")
    rest = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
    return {"role": role, "content": _content(turn[said], number), **rest}


def _content(content: Any, number: int) -> str:
    """Text as it is, or the text parts of a list of parts."""
    if content is None:  # a call of a tool has no text
        return ""
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "".join(parts)
        raise ValueError(f"message {number} has parts that are not text")
    if not isinstance(content, str):
        raise ValueError(f"message {number} says {kind(content)}, not a text")
    return content


def kind(value: Any) -> str:
    """A JSON value's kind in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return "null" if value is None else names.get(type(value), "a number")
