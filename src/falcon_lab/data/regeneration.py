"""Documents that the target writes itself.

A drafter is used on the target's own text, which is not the corpus: it is more regular, and wrong
in ways of its own. Continuing beginnings of the corpus gives text of that kind, with features as
they will be.

Shapes: T tokens of a document.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from falcon_lab.data.encoding import Encoded
from falcon_lab.errors import FalconLabError
from falcon_lab.files import replacing

TOGETHER = 96
"""Texts that are written side by side."""

Write = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Prompts and the longest length to whole texts (``decoding.plain.continue_texts`` of a target)."""


def regenerate(
    documents: Iterator[Encoded],
    write: Write,
    *,
    share: float,
    length: int,
    seed: int,
    kept_in: Path | None = None,
    author: str = "",
) -> list[Encoded]:
    """The documents, a ``share`` of them as the target would have continued them.

    Of a text that is learnt whole, a beginning of random length stays, half of a row at the most;
    of a chat, all before the first answer. What is written is learnt; a text's beginning too.

    Args:
        documents: of a training split.
        write: the target's hand.
        share: chance that a document is rewritten.
        length: tokens of a packed row; none is written longer.
        seed: draws the documents and their beginnings.
        kept_in: folder in which texts are kept for the next time.
        author: fingerprint of the target.

    Raises:
        FalconLabError: the texts cannot be kept.
    """
    drawn = random.Random(seed)
    result = list(documents)
    beginnings = {}
    for number, document in enumerate(result):
        chosen, cut = drawn.random() < share, drawn.random()
        stays = _beginning(document, length, cut)
        if chosen and 0 < stays < length:
            beginnings[number] = document.tokens[:stays]
    texts = _written(beginnings, write, length, kept_in, author)
    for number, tokens in texts.items():
        stays = len(beginnings[number])
        learnt = result[number].loss_mask[:stays] + [True] * (len(tokens) - stays)
        result[number] = Encoded(tokens, learnt)
    return result


def _beginning(document: Encoded, length: int, cut: float) -> int:
    """Tokens of a document that stay."""
    if not all(document.loss_mask):
        return document.loss_mask.index(True)
    return 1 + int(cut * min(len(document) - 1, length // 2))


def _written(
    beginnings: dict[int, list[int]], write: Write, length: int, folder: Path | None, author: str
) -> dict[int, list[int]]:
    """Texts by document, from the folder if they are there."""
    name = hashlib.sha256(repr((author, length, sorted(beginnings.items()))).encode())
    path = None if folder is None else folder / f"{name.hexdigest()[:16]}.safetensors"
    if path is not None and (kept := _read(path)) is not None:
        return dict(zip(sorted(beginnings), kept, strict=True))
    # Beginnings of like length side by side waste the least padding.
    order = sorted(beginnings, key=lambda number: (len(beginnings[number]), number))
    texts: dict[int, list[int]] = {}
    with tqdm(total=len(order), desc="the target writes", unit="text", disable=None) as bar:
        for at in range(0, len(order), TOGETHER):
            group = order[at : at + TOGETHER]
            whole = write([beginnings[number] for number in group], length)
            texts.update(zip(group, whole, strict=True))
            bar.update(len(group))
    if path is not None:
        _keep(path, [texts[number] for number in sorted(texts)])
    return texts


def _read(path: Path) -> list[list[int]] | None:
    try:
        kept = load_file(path)
    except (OSError, SafetensorError):  # not there, or damaged: written anew
        return None
    return [text.tolist() for text in kept["tokens"].split(kept["lengths"].tolist())]


def _keep(path: Path, texts: list[list[int]]) -> None:
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file({"tokens": tokens, "lengths": lengths}, temporary)
    except (OSError, SafetensorError) as error:
        raise FalconLabError(
            f"{path}: the target's texts cannot be kept ({error}); free some room, or set "
            "FALCON_LAB_CACHE to another folder"
        ) from error
