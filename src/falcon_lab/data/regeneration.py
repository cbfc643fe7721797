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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from falcon_lab.bars import Bar
from falcon_lab.data.encoding import Encoded
from falcon_lab.files import about, append_line, claimed, make_folder, read_lines, write_whole
from falcon_lab.stored import fitting

if TYPE_CHECKING:
    from falcon_lab.config.schema import DataConfig
    from falcon_lab.decoding.served import ServedEngine
    from falcon_lab.model.target import Target

Write = Callable[[Sequence[Sequence[int]], int], Iterable[tuple[int, list[int]]]]
"""Prompts and the longest length to each one's number and whole text, in any order
(``decoding.plain.continue_texts`` of a target, or of a server that runs it)."""


def served(target: Target, config: DataConfig) -> ServedEngine | None:
    """Return the server that writes in a target's place, if the configuration has one.

    Raises:
        FalconLabError: its key cannot be one.
    """
    if config.server is None:
        return None
    from falcon_lab.decoding.served import ServedEngine

    return ServedEngine(target, config.server)


def regenerate(
    documents: Iterator[Encoded],
    write: Write,
    *,
    share: float,
    length: int,
    seed: int,
    cache: Path | None = None,
    author: str = "",
    one_by_one: bool = False,
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
        one_by_one: keep each text as soon as it is there, for a writer whose texts do not depend on
            which others are still to be written.

    Raises:
        FalconLabError: the texts cannot be kept.
    """
    result = list(documents)
    beginnings = _beginnings(result, share, length, seed)
    texts = _written(
        beginnings, write, length, _place(beginnings, length, cache, author), one_by_one
    )
    for number, tokens in texts.items():
        kept = len(beginnings[number])
        mask = result[number].loss_mask[:kept] + [True] * (len(tokens) - kept)
        result[number] = Encoded(tokens, mask)
    return result


def is_kept(
    documents: Iterable[Encoded], *, share: float, length: int, seed: int, cache: Path, author: str
) -> bool:
    """Return whether ``regenerate`` would find all of its texts in the folder."""
    beginnings = _beginnings(list(documents), share, length, seed)
    path = _place(beginnings, length, cache, author)
    return path is not None and _read(path, beginnings) is not None


def _beginnings(
    documents: Sequence[Encoded], share: float, length: int, seed: int
) -> dict[int, list[int]]:
    """Return what stays of the documents that are continued, by their number."""
    drawn = random.Random(seed)
    beginnings = {}
    for number, document in enumerate(documents):
        chosen, cut = drawn.random() < share, drawn.random()
        kept = _beginning(document, length, cut)
        if chosen and 0 < kept < length:
            beginnings[number] = document.tokens[:kept]
    return beginnings


def _beginning(document: Encoded, length: int, cut: float) -> int:
    """Return how many tokens of a document are kept."""
    if not all(document.loss_mask):
        return document.loss_mask.index(True)
    return 1 + int(cut * min(len(document) - 1, length // 2))


def _place(
    beginnings: Mapping[int, list[int]], length: int, folder: Path | None, author: str
) -> Path | None:
    """Return the file of the texts."""
    name = hashlib.sha256(repr((author, length, sorted(beginnings.items()))).encode())
    return None if folder is None else folder / f"{name.hexdigest()[:16]}.safetensors"


def _written(
    beginnings: dict[int, list[int]],
    write: Write,
    length: int,
    path: Path | None,
    one_by_one: bool,
) -> dict[int, list[int]]:
    """Return the texts by document, from the file if there is one.

    Of several processes that want the same texts one writes them, and the others wait.
    """
    if path is None:
        return dict(_continued(beginnings, write, length))
    if (kept := _read(path, beginnings)) is None:
        with claimed(make_folder(path.parent) / f".{path.stem}.lock", wait=True):
            kept = _read(path, beginnings) or _made(beginnings, write, length, path, one_by_one)
    return dict(zip(sorted(beginnings), kept, strict=True))


def _made(
    beginnings: dict[int, list[int]], write: Write, length: int, path: Path, one_by_one: bool
) -> list[list[int]]:
    """Write the texts and keep them, each at once where that is allowed."""
    unfinished = path.with_suffix(".jsonl")
    texts = _unfinished(unfinished, beginnings) if one_by_one else {}
    rest = {number: begun for number, begun in beginnings.items() if number not in texts}
    for number, text in _continued(rest, write, length, done=len(texts)):
        texts[number] = text
        if one_by_one:
            append_line(unfinished, {"number": number, "tokens": text})
    ordered = [texts[number] for number in sorted(texts)]
    _keep(path, ordered)
    with about(unfinished):
        unfinished.unlink(missing_ok=True)
    return ordered


def _continued(
    beginnings: Mapping[int, list[int]], write: Write, length: int, *, done: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Yield documents' numbers and texts as they are written."""
    # Beginnings of like length side by side waste the least padding.
    order = sorted(beginnings, key=lambda number: (len(beginnings[number]), number))
    tokens = 0
    with Bar(total=done + len(order), initial=done, desc="regenerating", unit="text") as bar:
        for place, text in write([beginnings[number] for number in order], length):
            tokens += len(text) - len(beginnings[order[place]])
            seconds = max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{tokens / seconds:.0f} tok/s", refresh=False)
            bar.update()
            yield order[place], text


def _unfinished(path: Path, beginnings: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Return the texts that were written before a kill, by document."""
    texts: dict[int, list[int]] = {}
    for line in read_lines(path):
        found = fitting(line, Kept)
        begun = None if found is None else beginnings.get(found.number)
        if found is not None and begun is not None and found.tokens[: len(begun)] == begun:
            texts[found.number] = found.tokens
    return texts


@dataclass(frozen=True)
class Kept:
    """A text as it is kept before all of them are there."""

    number: int
    tokens: list[int]


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
