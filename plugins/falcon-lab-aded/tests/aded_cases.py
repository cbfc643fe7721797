"""The plug-in as if it were installed, tiny targets, and tables for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab_aded.counting import Counts
from falcon_lab_aded.successors import NONE, Known, Successors
from falcon_lab_aded.table import TrigramTable, pruned, tokenizer_digest

from falcon_lab import testing
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("llama", "gpt2", "gemma3")

target = cache(partial(testing.tiny_target, vocab=12, layers=2))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, **options: Any) -> Any:
    return testing.build_drafter(of, {"name": "aded", **options}, components=KNOWN)


def table_of(
    documents: Sequence[list[int]], vocabulary: int, most: int = 12, tokenizer: Any = None
) -> TrigramTable:
    counted = Counts.of(documents, vocabulary)
    facts = {"vocabulary": str(vocabulary), "corpus": "these texts"}
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer_digest(tokenizer)
    return TrigramTable(pruned(counted.trigrams, counted.counts, vocabulary, most), facts)


def knowing(successors: dict[tuple[int, int], dict[int, float]], vocabulary: int) -> Known:
    """Make a table of contexts with the scores of what follows."""
    found = {
        a * vocabulary + b: Successors.of([*scores], [*scores.values()])
        for (a, b), scores in successors.items()
    }
    return lambda context: found.get(context, NONE)
