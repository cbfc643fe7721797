"""Chat corpora of the hub by the names that trainers of drafters know them by.

A corpus is fetched once: its records become a file of chats in the cache, which is read as any
other. Records that no drafter could be trained on are left out and counted by the reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from falcon_lab.bars import Bar
from falcon_lab.data.documents import (
    Document,
    NotTextError,
    UnknownRoleError,
    kind,
    messages_of,
    read_jsonl,
    tools_of,
)
from falcon_lab.errors import FalconLabError, first_line
from falcon_lab.files import about, cached, make_folder, make_once, write_atomically
from falcon_lab.stored import parse_json, read_bounded, read_json

RECORDS = 20_000
"""Records that are fetched where the name does not say how many."""
MOST_RECORDS = 10**7
COUNTS = "records.json"
"""File beside the chats: what became of the records."""


@dataclass(frozen=True)
class HubCorpus:
    """Where a corpus is on the hub, and which columns a record's chat is in.

    Attributes:
        repository: id of the data set.
        subset: its configuration; None is its only one.
        split: of the data set, which is split again here.
        chat: column of a list of messages, of either layout; or of what the user says.
        answer: column of what the assistant says to that, where it is no part of the list.
    """

    repository: str
    chat: str
    subset: str | None = None
    split: str = "train"
    answer: str | None = None

    @property
    def where(self) -> tuple[str, ...]:
        """Return what ``datasets`` calls it."""
        return (self.repository,) if self.subset is None else (self.repository, self.subset)


_PERFECTBLEND = HubCorpus("mlabonne/open-perfectblend", "conversations")

HUB_CORPORA: dict[str, HubCorpus] = {
    "sharegpt": HubCorpus("Aeala/ShareGPT_Vicuna_unfiltered", "conversations"),
    "ultrachat": HubCorpus("HuggingFaceH4/ultrachat_200k", "messages", split="train_sft"),
    "perfectblend": _PERFECTBLEND,
    "open-perfectblend": _PERFECTBLEND,
    "gsm8k": HubCorpus("openai/gsm8k", "question", subset="main", answer="answer"),
    "magpie": HubCorpus("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "conversations"),
    "nemotron": HubCorpus(
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        "input",
        subset="SFT",
        split="chat",
        answer="output",
    ),
    "hermes-fc": HubCorpus(
        "NousResearch/hermes-function-calling-v1", "conversations", subset="func_calling"
    ),
}
"""Name in SpecForge and speculators -> the corpus, with the columns that these read."""


@dataclass(frozen=True)
class Wanted:
    """What ``ultrachat:50000@FOLDER`` asks for.

    Attributes:
        name: of the corpus.
        records: the first ones, that are fetched.
        copy: a local copy of the data set; None is the hub.
    """

    name: str
    records: int = RECORDS
    copy: str | None = None

    @property
    def corpus(self) -> HubCorpus:
        """Return where it is."""
        return HUB_CORPORA[self.name]

    @property
    def fingerprint(self) -> str:
        """Return twelve hex digits of what it is, without reading it."""
        stamps = [] if self.copy is None else _stamps(Path(self.copy))
        facts = {**asdict(self), **asdict(self.corpus), "files": stamps}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def folder(self) -> Path:
        """Return its place in the cache."""
        return cached("corpora", self.name, self.fingerprint)

    @property
    def file(self) -> Path:
        """Return the file of its chats, which may not be there yet."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def is_fetched(self) -> bool:
        """Return whether it is in the cache."""
        return _is_whole(self.folder)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return what tells whether the files of a copy have changed; nothing where it is not there."""
    with about(path, "read"):
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
        stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def wanted(name: str) -> Wanted | None:
    """Return what a name of a corpus asks of the hub; None where it is none of the hub's.

    Raises:
        FalconLabError: the number of records is none.
    """
    found = re.fullmatch(r"([\w.-]+)(?::([^@]*))?(?:@(.+))?", name)
    if found is None or found[1] not in HUB_CORPORA:
        return None
    if found[2] is None:
        return Wanted(found[1], copy=found[3])
    if not re.fullmatch(r"[0-9]{1,8}", found[2]) or not 1 <= int(found[2]) <= MOST_RECORDS:
        raise FalconLabError(
            f"data.corpus {name}: {found[2]!r} is no number of records; write {found[1]}:50000, "
            f"or {found[1]} for the first {RECORDS}"
        )
    return Wanted(found[1], int(found[2]), found[3])


@dataclass
class Counts:
    """What became of the records of a corpus.

    Attributes:
        source: the data set and its split, or the local copy.
        records: that were read.
        chats: that are kept.
        left_out: reason -> how many are not.
    """

    source: str
    records: int = 0
    chats: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Return all of it in a line."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        kept = f"{self.chats:,} chats of {self.records:,} records of {self.source}"
        return f"{kept}; left out: {reasons}" if reasons else kept


def fetch(corpus: Wanted) -> Path:
    """Return the file of a corpus's chats; write it first if need be, once.

    Raises:
        FalconLabError: the hub or the copy cannot be read, or its records are of another shape.
    """
    make_once(corpus.folder, lambda folder: _write(corpus, folder), is_finished=_is_whole)
    return corpus.file


def counts_of(corpus: Wanted) -> Counts:
    """Return what became of the records of a corpus that is fetched.

    Raises:
        FalconLabError: the file that says it is damaged.
    """
    advice = f"delete {corpus.folder}, so that the corpus is fetched again"
    return read_json(corpus.folder / COUNTS, Counts, "count of records", advice)


def first_chats(corpus: Wanted, limit: int) -> list[Document]:
    """Return the first chats of a corpus; nothing is written.

    Raises:
        FalconLabError: as ``fetch``.
    """
    chats = islice((chat for chat in _chats(corpus) if isinstance(chat, dict)), limit)
    return [
        Document(
            f"{corpus.name}:{chat['id']}",
            messages=chat["messages"],
            source=_source(corpus),
            tools=chat.get("tools"),
        )
        for chat in chats
    ]


def _is_whole(folder: Path) -> bool:
    return (folder / COUNTS).is_file()


def _write(corpus: Wanted, folder: Path) -> None:
    counts = Counts(_source(corpus))
    path = make_folder(folder) / corpus.file.name
    with about(path), path.open("w", encoding="utf-8") as file:
        bar = Bar(_chats(corpus), desc=f"fetching {corpus.name}", unit="doc")
        for chat in bar:
            counts.records += 1
            if isinstance(chat, str):
                counts.left_out[chat] = counts.left_out.get(chat, 0) + 1
            else:
                counts.chats += 1
                file.write(json.dumps(chat, ensure_ascii=False) + "\n")
    if not counts.chats:
        raise FalconLabError(f"data.corpus {corpus.name}: {counts.sentence}; nothing is left")
    write_atomically(folder / COUNTS, json.dumps(asdict(counts), indent=2) + "\n")


# --- records --------------------------------------------------------------------------------------


def _chats(corpus: Wanted) -> Iterator[dict[str, Any] | str]:
    """Yield a chat of every record, or why there is none."""
    for number, row in enumerate(islice(_rows(corpus), corpus.records)):
        try:
            messages = messages_of(_turns(row, corpus, number))
            tools = tools_of(row.get("tools"))
        except UnknownRoleError:
            yield "of unknown roles"
        except NotTextError:
            yield "with parts that are no text"
        except ValueError:
            yield "broken"
        else:
            yield _fault(messages) or _chat(number, messages, tools)


def _turns(row: Mapping[str, Any], corpus: Wanted, number: int) -> list[Any]:
    """Return the messages of a record as they stand there.

    Raises:
        FalconLabError: it has other columns.
        ValueError: something in a column is no text.
    """
    known = corpus.corpus

    def column(name: str, *kinds: type) -> Any:
        if isinstance(value := row.get(name), kinds):
            return value
        what = f"is {kind(value)}" if name in row else f"is not among {', '.join(map(str, row))}"
        raise FalconLabError(
            f"data.corpus {corpus.name}: record {number} of {_source(corpus)}: column {name!r} "
            f"{what:.200}; the data set has changed: name a copy of its former shape by "
            f"data.corpus={corpus.name}@PATH"
        )

    chat = column(known.chat, list) if known.answer is None else column(known.chat, list, str)
    asked = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    if known.answer is None:
        return list(asked)
    return [*asked, {"role": "assistant", "content": column(known.answer, str)}]


def _fault(messages: list[dict[str, Any]]) -> str | None:
    """Return why a chat is left out, or None."""
    if not messages or any(_is_blank(message) for message in messages):
        return "empty"
    speakers = [message["role"] for message in messages if message["role"] != "system"]
    if "assistant" not in speakers:
        return "without an answer"
    if speakers[0] == "assistant":
        return "that begin with an answer"
    for one, next_one in pairwise(speakers):
        if one == next_one != "tool":
            return f"with two turns of {'a user' if one == 'user' else 'one speaker'} in a row"
    return None


def _is_blank(message: Mapping[str, Any]) -> bool:
    spoken = message["role"] in ("user", "assistant")
    return spoken and not message["content"].strip() and not message.get("tool_calls")


def _chat(
    number: int, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    # A system turn beside a column of tools lists them already (Hermes).
    listed = any(message["role"] == "system" for message in messages)
    named = {} if tools is None or listed else {"tools": tools}
    return {"id": number, "messages": messages, **named}


# --- where records come from ----------------------------------------------------------------------


def _source(corpus: Wanted) -> str:
    known = corpus.corpus
    return corpus.copy or f"{'/'.join(known.where)} ({known.split})"


def _rows(corpus: Wanted) -> Iterator[Mapping[str, Any]]:
    known, name = corpus.corpus, f"data.corpus {corpus.name}"
    instead = f"or name a copy of it, data.corpus={corpus.name}@PATH (of save_to_disk, or JSONL)"
    if corpus.copy is None:
        return hub_rows(known.where, known.split, name, instead, streaming=True)
    return _copied(Path(corpus.copy), known.split, name, instead)


def hub_rows(
    where: tuple[str, ...], split: str, asked: str, instead: str, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data set of the hub as they arrive.

    Args:
        where: its id, and configuration if it has several.
        split: of it.
        asked: begins the error: the key that names the set.
        instead: what else can be done.
        options: of ``datasets.load_dataset``.

    Raises:
        FalconLabError: ``datasets`` is not installed, or the hub cannot be reached.
    """
    datasets = _datasets(asked, instead)
    try:
        yield from datasets.load_dataset(*where, split=split, **options)
    except Exception as error:  # the network, the hub and the cache have many ways to fail
        raise FalconLabError(
            f"{asked}: cannot load {where[0]} from the hub "
            f"({type(error).__name__}: {first_line(error)}); connect once, {instead}"
        ) from error


def _datasets(asked: str, instead: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise FalconLabError(
            f"{asked} needs the data extra: pip install 'falcon-lab[data]', {instead}"
        ) from None
    return datasets


SAVED = ("dataset_dict.json", "state.json")
"""Files of which ``datasets.save_to_disk`` writes one into a folder."""


def _copied(path: Path, split: str, asked: str, instead: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a local copy."""
    with about(path, "read"):
        path.stat()
        parts = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(part.name in SAVED for part in parts):
        yield from _saved(path, split, asked, instead)
        return
    files = [part for part in parts if part.name.endswith((".jsonl", ".jsonl.gz", ".json"))]
    if not files:
        raise FalconLabError(
            f"{asked}: {path} holds neither a data set that datasets has saved nor .jsonl or .json "
            "files; name one that does"
        )
    for file in files:
        yield from _json(file)


def _saved(path: Path, split: str, asked: str, instead: str) -> Iterator[Mapping[str, Any]]:
    datasets = _datasets(asked, instead)
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a folder of another version may provoke
        raise FalconLabError(
            f"{asked}: cannot load {path} ({type(error).__name__}: {first_line(error)}); save it "
            "again with datasets' save_to_disk"
        ) from error
    if (path / SAVED[0]).is_file():
        if split not in found:
            known = ", ".join(map(str, found))
            raise FalconLabError(f"{asked}: {path} has no split {split!r}, but {known}")
        found = found[split]
    yield from found


def _json(file: Path) -> Iterator[Mapping[str, Any]]:
    if not file.name.endswith(".json"):
        for _, row in read_jsonl(file):
            yield row
        return
    mend = "name a file of a list of objects, or one with an object a line (.jsonl)"
    rows = parse_json(read_bounded(file), f"{file}: no JSON", mend, finite=False)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise FalconLabError(f"{file}: is {kind(rows)}; {mend}")
    yield from rows
