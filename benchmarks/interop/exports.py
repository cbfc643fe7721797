"""Ask an engine about exports, one after the other; imports nothing that an engine's has not."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def ask_each(
    words: Iterable[str], found: dict[str, Any], out: Path, ask: Callable[[str, str], Any]
) -> None:
    """Write what an engine answers to every export, or with what it ends.

    Args:
        words: ``HEAD:EXPORT``.
        found: to be written; answers are added under ``exports``.
        out: file, written after every export.
        ask: takes a head and the name of an export.
    """
    found["exports"] = {}
    for word in words:
        head, name = word.split(":")
        try:
            found["exports"][word] = ask(head, name)
        except Exception as error:  # the engine's own: the other exports are asked all the same
            traceback.print_exc()
            found["exports"][word] = {"error": " ".join(f"{error}".split())[:200]}
        out.write_text(json.dumps(found), "utf-8")
