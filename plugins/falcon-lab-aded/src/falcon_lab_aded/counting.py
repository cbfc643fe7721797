"""Counting the tri-grams of a corpus, part by part, so that a kill costs one part at the most.

A part is so many documents; what was counted of it is a file in a folder beside the table, which is
removed when the table is there.

Shapes: T tokens of a document, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from falcon_lab.data.corpora import corpus, corpus_fingerprint
from falcon_lab.data.encoding import encode_all
from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, locked, make_folder, write_whole
from falcon_lab_aded.table import MOST_VOCABULARY, Integers, TrigramTable, pruned, tokenizer_digest


@dataclass(frozen=True)
class Sample:
    """The documents that are counted.

    Attributes:
        corpus: a name, or the path of files.
        documents: of its training split, at most; None: all.
        seed: of their choice.
        successors: of every context that are kept, the most frequent.
        template: chat template in place of the tokenizer's own.
        part: documents that are counted together; a kill costs as many at the most.
    """

    corpus: str
    documents: int | None = None
    seed: int = 0
    successors: int = 12
    template: str | None = None
    part: int = 1024


@dataclass(frozen=True)
class Counts:
    """Tri-grams with how often they were seen.

    Attributes:
        trigrams: each once, ascending.
        counts: of each.
        tokens: that were read.
        documents: that were read.
    """

    trigrams: Integers
    counts: Integers
    tokens: int
    documents: int

    @classmethod
    def of(cls, documents: Iterable[list[int]], vocabulary: int) -> Counts:
        """Count the tri-grams of documents, none of which reaches into another."""
        found, tokens, number = [np.empty(0, np.int64)], 0, 0
        for document in documents:
            text = np.array(document, np.int64)
            found.append((text[:-2] * vocabulary + text[1:-1]) * vocabulary + text[2:])
            tokens, number = tokens + len(text), number + 1
        trigrams, counts = np.unique(np.concatenate(found), return_counts=True)
        return cls(trigrams, counts.astype(np.int64), tokens, number)

    @classmethod
    def joined(cls, parts: Iterable[Counts]) -> Counts:
        """Add counts up."""
        listed = list(parts)
        every = np.concatenate([part.trigrams for part in listed])
        order = np.argsort(every, kind="stable")
        every, counts = every[order], np.concatenate([part.counts for part in listed])[order]
        trigrams, first = np.unique(every, return_index=True)
        totals = np.add.reduceat(counts, first) if len(first) else counts
        tokens = sum(part.tokens for part in listed)
        return cls(trigrams, totals, tokens, sum(part.documents for part in listed))

    def save(self, path: Path, identity: str) -> None:
        """Write them, whole or not at all."""
        arrays = {"trigrams": self.trigrams, "counts": self.counts}
        facts = {"identity": identity, "tokens": str(self.tokens), "documents": str(self.documents)}
        write_whole(path, lambda place: save_file(arrays, place, facts), also=(SafetensorError,))

    @classmethod
    def load(cls, path: Path, identity: str) -> Counts | None:
        """Return what was saved by that identity; None: nothing whole of it is there."""
        try:
            with safe_open(path, framework="numpy") as file:
                facts = file.metadata() or {}
                if facts.get("identity") != identity:
                    return None
                trigrams, counts = (file.get_tensor(name) for name in ("trigrams", "counts"))
                return cls(trigrams, counts, int(facts["tokens"]), int(facts["documents"]))
        except (OSError, SafetensorError):
            return None


def build_table(
    sample: Sample,
    tokenizer: Any,
    vocabulary: int,
    out: Path,
    progress: Callable[[int], object] = lambda documents: None,
) -> tuple[TrigramTable, bool]:
    """Count a corpus and write the table, unless it is there; go on where a kill ended it.

    Args:
        sample: what is counted.
        tokenizer: the target's.
        vocabulary: V of the target.
        out: the file.
        progress: is called with how many documents were counted more.

    Returns:
        The table, and whether it was there.

    Raises:
        FalconLabError: the corpus cannot be read, holds no three tokens in a row, or the file
            cannot be written.
    """
    if vocabulary > MOST_VOCABULARY:
        raise FalconLabError(
            f"the target has {vocabulary} tokens; a table has room for {MOST_VOCABULARY}"
        )
    facts = {
        "corpus": sample.corpus,
        "vocabulary": str(vocabulary),
        "tokenizer": tokenizer_digest(tokenizer),
        "identity": identity_of(sample, tokenizer, vocabulary),
    }
    make_folder(out.parent)
    folder = out.with_name(f".{out.name}.parts")
    busy = f"{out}: another process writes it; wait for its end, or give another --out"
    with locked(out.with_name(f".{out.name}.lock"), busy=busy):
        there = _finished(out, facts["identity"])
        if there is None:
            whole = Counts.joined(
                _parts(sample, tokenizer, vocabulary, folder, facts["identity"], progress)
            )
            if not len(whole.trigrams):
                raise FalconLabError(f"corpus {sample.corpus}: no document of it has three tokens")
            facts |= {"tokens": str(whole.tokens), "documents": str(whole.documents)}
            arrays = pruned(whole.trigrams, whole.counts, vocabulary, sample.successors)
            TrigramTable(arrays, facts).save(folder / "table.safetensors")
            with about(out):
                (folder / "table.safetensors").replace(out)
        shutil.rmtree(folder, ignore_errors=True)
    return there or TrigramTable.open(out), there is not None


def identity_of(sample: Sample, tokenizer: Any, vocabulary: int) -> str:
    """Return sixteen hex digits that change with whatever changes the table."""
    facts = asdict(sample) | {"text": corpus_fingerprint(sample.corpus)}
    facts |= {"tokenizer": tokenizer_digest(tokenizer), "vocabulary": vocabulary}
    facts["chats"] = str(getattr(tokenizer, "chat_template", None))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _finished(out: Path, identity: str) -> TrigramTable | None:
    """Return the table that is there; None: none, or another one, which is replaced."""
    if not out.exists():
        return None
    try:
        there = TrigramTable.open(out)
    except FalconLabError:
        if out.stat().st_size:  # something of the user's own
            raise
        return None
    return there if there.facts.get("identity") == identity else None


def _parts(
    sample: Sample,
    tokenizer: Any,
    vocabulary: int,
    folder: Path,
    identity: str,
    progress: Callable[[int], object],
) -> Iterator[Counts]:
    """Yield the counts of every part, those that are there and those that are still to be made."""
    documents = corpus(sample.corpus, split="train", limit=sample.documents, seed=sample.seed)
    number = 0
    while group := list(islice(documents, sample.part)):
        path = folder / f"part-{number:05d}.safetensors"
        counted = Counts.load(path, identity)
        if counted is None:
            encoded = encode_all(group, tokenizer, sample.template)
            counted = Counts.of((each.tokens for each in encoded), vocabulary)
            counted.save(path, identity)
        progress(len(group))
        yield counted
        number += 1
