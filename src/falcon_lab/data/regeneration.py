"""Training documents that the target continues (``data.regenerate``).

A drafter drafts for the target's own text, which is more regular than the corpus and has errors of
its own. Continuing beginnings of the corpus gives text of that kind, and the features that come
with it.

Shapes: T tokens of a document.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from falcon_lab.bars import Bar
from falcon_lab.data.encoding import Encoded
from falcon_lab.files import write_whole

Write = Callable[[Sequence[Sequence[int]], int], Iterable[tuple[int, list[int]]]]
"""Prompts and the longest length to each one's number and whole text, in any order
(``decoding.plain.continue_texts`` of a target)."""


def regenerate(
    documents: Iterator[Encoded],
    write: Write,
    *,
    share: float,
    length: int,
    seed: int,
    cache: Path | None = None,
    author: str = "",
) -> list[Encoded]:
    """Return the documents, a ``share`` of them as the target continues them.

    Of a text a beginning of random length stays, half of a sequence at the most, and of a chat all
    before its first answer. The loss mask has the continuation, and a text's beginning too.

    Args:
        documents: of a training split.
        write: continues texts as the target does.
        share: chance that a document is continued.
        length: tokens of a packed sequence; none is continued further.
        seed: draws the documents and their beginnings.
        cache: folder in which the texts are kept.
        author: fingerprint of the target.

    Raises:
        FalconLabError: the texts cannot be kept.
    """
    drawn = random.Random(seed)
    result = list(documents)
    beginnings = {}
    for number, document in enumerate(result):
        chosen, cut = drawn.random() < share, drawn.random()
        kept = _beginning(document, length, cut)
        if chosen and 0 < kept < length:
            beginnings[number] = document.tokens[:kept]
    texts = _written(beginnings, write, length, cache, author)
    for number, tokens in texts.items():
        kept = len(beginnings[number])
        mask = result[number].loss_mask[:kept] + [True] * (len(tokens) - kept)
        result[number] = Encoded(tokens, mask)
    return result


def _beginning(document: Encoded, length: int, cut: float) -> int:
    """Return how many tokens of a document are kept."""
    if not all(document.loss_mask):
        return document.loss_mask.index(True)
    return 1 + int(cut * min(len(document) - 1, length // 2))


def _written(
    beginnings: dict[int, list[int]], write: Write, length: int, folder: Path | None, author: str
) -> dict[int, list[int]]:
    """Return the texts by document, from the folder if it has them."""
    name = hashlib.sha256(repr((author, length, sorted(beginnings.items()))).encode())
    path = None if folder is None else folder / f"{name.hexdigest()[:16]}.safetensors"
    if path is not None and (kept := _read(path, beginnings)) is not None:
        return dict(zip(sorted(beginnings), kept, strict=True))
    # Beginnings of like length side by side waste the least padding.
    order = sorted(beginnings, key=lambda number: (len(beginnings[number]), number))
    texts: dict[int, list[int]] = {}
    with Bar(total=len(order), desc="regenerating", unit="text") as bar:
        for place, text in write([beginnings[number] for number in order], length):
            texts[order[place]] = text
            bar.update()
    if path is not None:
        _keep(path, [texts[number] for number in sorted(texts)])
    return texts


def _read(path: Path, beginnings: Mapping[int, Sequence[int]]) -> list[list[int]] | None:
    """Return the texts of a file; None where it is not there, or damaged: written anew."""
    try:
        kept = load_file(path)
        parts = kept["tokens"].split(kept["lengths"].tolist())
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError):
        return None
    texts = [text.tolist() for text in parts]
    pairs = zip(texts, (beginnings[number] for number in sorted(beginnings)), strict=False)
    begin_so = all(text[: len(begun)] == list(begun) for text, begun in pairs)
    return texts if len(texts) == len(beginnings) and begin_so else None


def _keep(path: Path, texts: list[list[int]]) -> None:
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    tensors = {"tokens": tokens, "lengths": lengths}
    write_whole(path, lambda temporary: save_file(tensors, temporary), also=(SafetensorError,))
