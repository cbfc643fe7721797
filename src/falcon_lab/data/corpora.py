"""Corpora by name: generated modules, the standard library, the hub's, files of text and chats.

Every corpus has three disjoint splits. Which one a document is in depends on its identity alone,
never on the order in which files are found.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from falcon_lab.data.documents import Document, read_documents
from falcon_lab.data.generated.corpus import SPLITS, generate_modules
from falcon_lab.data.hub import HUB_CORPORA, Wanted, counts_of, fetch, first_chats, wanted
from falcon_lab.errors import FalconLabError, did_you_mean
from falcon_lab.files import about
from falcon_lab.plugins.discovery import load_components

CODE = {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".js", ".ts", ".java", ".go", ".rs"}
SCRIPTS = {".rb", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml"}
TEXT_SUFFIXES = CODE | SCRIPTS | {".txt", ".md", ".rst", ".jsonl"}
SAMPLES = (".jsonl", ".jsonl.gz")
"""How files of chats or texts may end, one a line."""
LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages"}
    | {"pydoc_data", "__pycache__", "turtledemo", "ensurepip", "lib-dynload"}
)
"""Folders of the standard library that are no library code, or not shipped everywhere."""


def read_text(file: Path) -> str | None:
    """Return the text of a file, or None when it is unreadable, not UTF-8, or blank."""
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


@cache
def standard_library() -> tuple[tuple[str, Path], ...]:
    """Return ``(relative path, file)`` of the readable sources of this Python's library, sorted.

    Raises:
        FalconLabError: this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        (file.relative_to(root).as_posix(), file)
        for file in sorted(root.rglob("*.py"))
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts) and read_text(file) is not None
    ]
    if not files:
        raise FalconLabError(f"{root}: this Python comes without library sources; use 'generated'")
    return tuple(files)


def text_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield ``(relative path, file)`` of the visible text files below a folder, sorted."""
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        known = file.suffix in TEXT_SUFFIXES or file.name.endswith(SAMPLES)
        if known and file.is_file() and not hidden:
            yield file.relative_to(root).as_posix(), file


SECTION = 8000
"""Characters after which a file of text is cut at the next empty line."""
_ENDLESS = 2**32
OWN = ("generated", "stdlib")
"""Corpora that are no files; a plug-in's of such a name goes by its full name."""


def corpus(name: str, *, split: str, limit: int | None = None, seed: int = 0) -> Iterator[Document]:
    """Return the documents of one split, in an order that depends on ``seed`` alone.

    Args:
        name: ``generated``, ``stdlib``, a registered one, one of the hub (``hub.py``), a folder or
            file of text, or a JSONL of chats or texts.
        split: ``train``, ``validation`` or ``heldout``.
        limit: documents at the most; None is all of them (``generated`` has 2^32).
        seed: chooses the generated documents, or the order of the others.

    Raises:
        FalconLabError: no such split or path, nothing to read there, or a line that is no sample.
    """
    if split not in SPLITS:
        raise FalconLabError(f"no split {split!r}; choose one of {', '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise FalconLabError(f"corpus {name}: at least 1 document is needed, not {limit}")
    if name == "generated":
        count = _ENDLESS if limit is None else limit
        texts = enumerate(generate_modules(split, count, seed))
        ids = ((f"generated/{split}/{seed}/{number}", text) for number, text in texts)
        return (Document(name, text=text, source=name) for name, text in ids)
    if name == "stdlib":
        chosen = _by_threshold(standard_library(), split)
        files = sorted(chosen, key=lambda item: digest(f"{seed}:{item[0]}"))
        return islice((_file(*item, "stdlib") for item in files), limit)
    found = _read(place_of(name))
    if _of_hub(name) is None:
        chosen_documents = _by_rank(found, split, name)
    else:  # of which more may be fetched later, and none may change sides then
        chosen_documents = [each for each in found if split_of(each.id) == split]
    documents = sorted(chosen_documents, key=_shuffled(seed))
    return iter(documents[:limit])


def first_documents(name: str, limit: int, seed: int) -> Iterator[Document]:
    """Return some training documents, to see whether they can be used; nothing is fetched for it.

    Raises:
        FalconLabError: as ``corpus``, as far as these show it.
    """
    hub = _of_hub(name)
    if hub is None or hub.is_fetched:
        return corpus(name, split="train", limit=limit, seed=seed)
    return iter(first_chats(hub, limit))


def left_out(name: str) -> str | None:
    """Return what became of the records of a hub's corpus, in a line; None of all others.

    Raises:
        FalconLabError: as ``corpus``.
    """
    hub = _of_hub(name)
    if hub is None:
        return None
    fetch(hub)
    return counts_of(hub).sentence


def corpus_fingerprint(name: str) -> str:
    """Return sixteen hex digits that change when the documents of a corpus do.

    Raises:
        FalconLabError: no such path.
    """
    if name == "generated":
        parts: Iterable[bytes] = (text.encode() for text in generate_modules("train", 64))
    elif name == "stdlib":
        sizes = (f"{path}:{file.stat().st_size}" for path, file in standard_library())
        parts = (text.encode() for text in (platform.python_version(), *sizes))
    elif (hub := _of_hub(name)) is not None:
        parts = [hub.fingerprint.encode()]  # it is fetched once, and may not be yet
    else:
        parts = (file.read_bytes() for file in _files(place_of(name)))
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def corpus_files(name: str) -> list[Path]:
    """Return the files that a corpus is read from; none where it is no file of the user's.

    Raises:
        FalconLabError: no such path.
    """
    return [] if name in OWN or _of_hub(name) is not None else _files(place_of(name))


def _of_hub(name: str) -> Wanted | None:
    """Return what a name asks of the hub, unless it is a plug-in's or a path."""
    hub = wanted(name)
    if hub is None or os.path.lexists(name) or load_components().brought("corpus", name):
        return None
    return hub


def place_of(name: str) -> Path:
    """Return the file or folder of a corpus: what a plug-in brings by that name, or its path.

    One of the hub is fetched first, unless it is in the cache.

    Raises:
        FalconLabError: none of them is there, or the hub cannot be reached.
    """
    components = load_components()
    if (found := components.brought("corpus", name)) is not None:
        return found.path
    if (hub := _of_hub(name)) is not None:
        return fetch(hub)
    path = Path(name)
    with about(path, "read"):
        there = path.exists()
    if not there:
        known = [*OWN, *HUB_CORPORA, *components.names("corpus")]
        raise FalconLabError(
            f"no corpus {name!r}, and no such file or folder"
            f"{did_you_mean(name, known, all_of_them=True)}"
        )
    return path


def digest(text: str) -> str:
    """Return a hash that is the same on every platform."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _shuffled(seed: int) -> Callable[[Document], str]:
    return lambda document: digest(f"{seed}:{document.id}")


def _by_threshold(files: Iterable[tuple[str, Path]], split: str) -> list[tuple[str, Path]]:
    """Choose about 90, 5 and 5 percent of the files, by a hash of the relative path."""
    return [(path, file) for path, file in files if split_of(path) == split]


def split_of(identity: str) -> str:
    """Return the split of a document that does not depend on which others there are."""
    share = int(digest(identity)[:8], 16) / 2**32
    return "train" if share < 0.9 else "validation" if share < 0.95 else "heldout"


def _by_rank(documents: list[Document], split: str, name: str) -> list[Document]:
    """Choose 5 percent, at least one, each for validation and held-out, by a hash of the id."""
    if len(documents) < len(SPLITS):
        raise FalconLabError(
            f"{name}: {len(documents)} document(s) found; at least 3 are needed, one each for "
            "training, validation and held-out"
        )
    ranked = sorted(documents, key=lambda document: digest(document.id))
    share = max(1, len(ranked) // 20)
    parts = {
        "validation": ranked[:share],
        "heldout": ranked[share : 2 * share],
        "train": ranked[2 * share :],
    }
    return parts[split]


def _files(path: Path) -> list[Path]:
    return [file for _, file in text_files(path)] if path.is_dir() else [path]


def _read(path: Path) -> list[Document]:
    """Read all documents of a file or folder."""
    files = _files(path)
    found = [document for file in files for document in _documents(file, path)]
    if not found:
        what = "no readable text files in it" if path.is_dir() else "it holds no text"
        raise FalconLabError(f"{path}: the corpus is empty, {what}")
    return found


def _documents(file: Path, root: Path) -> Iterator[Document]:
    name = file.relative_to(root).as_posix() if root.is_dir() else file.name
    # One that is no UTF-8 could not be written down.
    name = os.fsencode(name).decode(errors="replace")
    if file.name.endswith(SAMPLES):
        yield from read_documents(file, name)
        return
    text = read_text(file)
    if text is None and not root.is_dir():
        raise FalconLabError(
            f"{file}: cannot be read, holds nothing, or is no text in UTF-8; save it as UTF-8"
        )
    for line, section in sections(text or ""):
        yield Document(f"{name}:{line}", text=section, source=f"{file}:{line}")


def _file(path: str, file: Path, prefix: str) -> Document:
    return Document(f"{prefix}/{path}", text=read_text(file), source=str(file))


def sections(text: str) -> Iterator[tuple[int, str]]:
    """Yield ``(first line, text)`` of the parts of a long text, cut where a line is empty."""
    start, size = 1, 0
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        lines.append(line)
        size += len(line)
        if size >= SECTION and (not line.strip() or size >= 2 * SECTION):
            yield start, "".join(lines)
            start, size, lines = number + 1, 0, []
    if "".join(lines).strip():
        yield start, "".join(lines)
