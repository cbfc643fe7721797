"""The tiny targets of ``falcon_lab.testing``, and the same as folders.

``from tiny_models import tiny_target`` works in every test (``conftest.py`` sees to it).
"""

from __future__ import annotations

from pathlib import Path

from falcon_lab.testing.targets import (
    FAMILIES,
    POSITIONS,
    WINDOW,
    tiny_config,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

__all__ = [
    "FAMILIES",
    "POSITIONS",
    "WINDOW",
    "save_tiny",
    "tiny_config",
    "tiny_model",
    "tiny_target",
    "tiny_tokenizer",
]


def save_tiny(
    folder: Path, family: str = "llama", *, vocab: int = 64, shard: str = "5GB", **shape: int
) -> Path:
    """A model and its tokenizer as a Hugging Face folder; a small ``shard`` splits the weights."""
    tiny_model(family, vocab=vocab, **shape).save_pretrained(folder, max_shard_size=shard)
    tiny_tokenizer(vocab).save_pretrained(folder)
    return Path(folder)
