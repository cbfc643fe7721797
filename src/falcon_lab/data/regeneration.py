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


PART = 256
"""Texts that are written together."""


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
    missing = unwritten(
        documents, share=share, length=length, seed=seed, cache=cache, author=author
    )
    return missing is None


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


def unwritten(
    documents: Iterable[Encoded], *, share: float, length: int, seed: int, cache: Path, author: str
) -> TextParts | None:
    """Return the texts that ``regenerate`` would have written; None where they are there."""
    beginnings = _beginnings(list(documents), share, length, seed)
    path = _place(beginnings, length, cache, author)
    if path is None or _read(path, beginnings) is not None:
        return None
    return TextParts(beginnings, length, path)


class TextParts:
    """Texts that are written in parts, which several processes may share, and a kill costs one.

    What is in a part follows from the texts alone, so that it is the same whoever writes it.

    Args:
        beginnings: by document.
        length: of no text more.
        path: of all of them; the parts lie beside it.
    """

    def __init__(self, beginnings: Mapping[int, list[int]], length: int, path: Path) -> None:
        self.length, self.path = length, path
        order = _by_length(beginnings)
        self._parts = [
            {number: beginnings[number] for number in order[start : start + PART]}
            for start in range(0, len(order), PART)
        ]

    def __len__(self) -> int:
        return len(self._parts)

    def sizes(self) -> list[int]:
        """Return how many texts each part has."""
        return [len(part) for part in self._parts]

    def is_there(self, number: int) -> bool:
        """Return whether a part is written."""
        return _read(self._place(number), self._parts[number]) is not None

    def write(
        self,
        number: int,
        write: Write,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> None:
        """Write a part, unless it is there.

        Args:
            number: of the part.
            write: continues texts as the target does.
            progress: is called with the new tokens of every text.

        Raises:
            FalconLabError: it cannot be written.
        """
        part, path = self._parts[number], self._place(number)
        with claimed(make_folder(path.parent) / f".{path.stem}.lock", wait=True):
            if self.is_there(number):
                return
            texts = dict(_texts(part, write, self.length, progress))
            _keep(path, [texts[each] for each in sorted(texts)])

    def join(self) -> dict[int, list[int]]:
        """Return all texts by document, in ascending order, and keep them in one file."""
        texts: dict[int, list[int]] = {}
        for number, part in enumerate(self._parts):
            kept = _read(self._place(number), part)
            assert kept is not None, self._place(number)
            texts |= zip(sorted(part), kept, strict=True)
        ordered = {number: texts[number] for number in sorted(texts)}
        _keep(self.path, list(ordered.values()))
        for number in range(len(self)):
            with about(self._place(number)):
                self._place(number).unlink(missing_ok=True)
        return ordered

    def _place(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{number:05d}.safetensors")


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
            if (kept := _read(path, beginnings)) is None:
                if not one_by_one:
                    return _in_parts(TextParts(beginnings, length, path), write)
                kept = _one_by_one(beginnings, write, length, path)
    return dict(zip(sorted(beginnings), kept, strict=True))


def _in_parts(parts: TextParts, write: Write) -> dict[int, list[int]]:
    """Write the texts, part by part, and keep them."""
    there = {number for number in range(len(parts)) if parts.is_there(number)}
    done = sum(size for number, size in enumerate(parts.sizes()) if number in there)
    with TextBar(sum(parts.sizes()), done) as bar:
        for number in range(len(parts)):
            if number not in there:
                parts.write(number, write, bar.add)
    return parts.join()


def _one_by_one(
    beginnings: dict[int, list[int]], write: Write, length: int, path: Path
) -> list[list[int]]:
    """Write the texts and keep them, each at once."""
    unfinished = path.with_suffix(".jsonl")
    texts = _unfinished(unfinished, beginnings)
    rest = {number: begun for number, begun in beginnings.items() if number not in texts}
    for number, text in _continued(rest, write, length, done=len(texts)):
        texts[number] = text
        append_line(unfinished, {"number": number, "tokens": text})
    ordered = [texts[number] for number in sorted(texts)]
    _keep(path, ordered)
    with about(unfinished):
        unfinished.unlink(missing_ok=True)
    return ordered


class TextBar(Bar):
    """A bar of texts that are written, with tokens a second.

    Args:
        total: texts.
        done: of them before.
    """

    def __init__(self, total: int, done: int) -> None:
        super().__init__(total=total, initial=done, desc="regenerating", unit="text")
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Count a text with so many new tokens."""
        self._tokens += tokens
        seconds = max(self.format_dict["elapsed"], 1e-9)
        self.set_postfix_str(f"{self._tokens / seconds:.0f} tok/s", refresh=False)
        self.update()


def _continued(
    beginnings: Mapping[int, list[int]], write: Write, length: int, *, done: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Yield documents' numbers and texts as they are written, with a progress bar."""
    with TextBar(done + len(beginnings), done) as bar:
        yield from _texts(beginnings, write, length, bar.add)


def _texts(
    beginnings: Mapping[int, list[int]],
    write: Write,
    length: int,
    progress: Callable[[int], object],
) -> Iterator[tuple[int, list[int]]]:
    """Yield documents' numbers and texts as they are written, and report each one's new tokens."""
    order = _by_length(beginnings)
    for place, text in write([beginnings[number] for number in order], length):
        number = order[place]
        progress(len(text) - len(beginnings[number]))
        yield number, text


def _by_length(beginnings: Mapping[int, list[int]]) -> list[int]:
    """Return documents in an order that wastes the least padding: of like length side by side."""
    return sorted(beginnings, key=lambda number: (len(beginnings[number]), number))


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
