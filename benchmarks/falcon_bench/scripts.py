"""What all scripts do alike: read ``KEY=VALUE`` words, tell the user, and write their results."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def pairs(words: Sequence[str], *, flags: Collection[str] = ()) -> dict[str, str]:
    """Return ``KEY=VALUE`` words as a mapping.

    Args:
        words: of the command line.
        flags: words that may stand among them.

    Raises:
        SystemExit: another word is no ``KEY=VALUE``.
    """
    if wrong := [word for word in names(words) if word not in flags]:
        raise SystemExit(f"no KEY=VALUE: {', '.join(wrong)}")
    return dict(word.split("=", 1) for word in words if "=" in word)


def names(words: Sequence[str]) -> list[str]:
    """Return the words that are no ``KEY=VALUE``."""
    return [word for word in words if "=" not in word]


def split(words: Sequence[str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return a script's own keys with their values, and the other words, in their order."""
    mine = [word for word in words if "=" in word and word.split("=", 1)[0] in own]
    return pairs(mine), [word for word in words if word not in mine]


def numbers(text: str) -> list[int]:
    """Return the numbers between commas."""
    return [int(each) for each in text.split(",")]


def tell(line: str) -> None:
    """Print one line for the user, beside the results."""
    print(line, file=sys.stderr)


def results_path(folder: Path, name: str, results: Mapping[str, Any], suffix: str = "json") -> Path:
    """Return ``DATE-NAME-DEVICE`` in a folder; the results say on which device they were made."""
    device = results["hardware"]["device"].partition(":")[0]
    return folder / f"{datetime.now(UTC).date()}-{name}-{device}.{suffix}"
