"""The plug-in as if it were installed, and tiny targets that repeat themselves."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from falcon_lab import testing

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
VOCAB = 16

target = cache(partial(testing.tiny_target, vocab=VOCAB, positions=96))
engine = partial(testing.engine, components=KNOWN)
