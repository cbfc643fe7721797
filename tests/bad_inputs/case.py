"""What a bad input is, how it is tried, and what must be said of a refusal."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from falcon_lab.cli import main

Change = Callable[[], None]
"""Does something to the prepared folder, which is the current one."""

LINES, CHARACTERS = 3, 500
"""What a refusal may be long: lines, and characters of each."""

WARNING = "falcon-lab: warning:"


@dataclass(frozen=True)
class BadInput:
    """A command line that must be refused, and what is in the way.

    Attributes:
        name: what is wrong, in words; unique.
        words: of the command line; a text is split as a shell does it.
        place: file, key or option that the refusal must name.
        remedy: a part of what it says is to be done.
        given: what is done to the prepared folder before.
        environment: variables; None takes one away.
        typed: standard input.
        code: the exit code.
        leaves: patterns of files that the command may leave although it is refused.
    """

    name: str
    words: str | Sequence[str]
    place: str
    remedy: str
    given: Change | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    typed: str | bytes = ""
    code: int = 2
    leaves: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The command line without the program's name."""
        return shlex.split(self.words) if isinstance(self.words, str) else list(self.words)


@dataclass(frozen=True)
class Refusal:
    """What a command said and left.

    Attributes:
        code: its exit code.
        errors: what it wrote on stderr.
        exception: what it raised, unless it left by an exit code.
        before, after: path -> what is there.
    """

    code: int
    errors: str
    exception: BaseException | None
    before: dict[str, str]
    after: dict[str, str]

    @property
    def message(self) -> list[str]:
        """The lines of stderr from the refusal on; what stands before are progress and warnings."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        for number, line in enumerate(lines):
            if line.startswith(("falcon-lab: ", "Usage: ", "Error: ")) and not line.startswith(
                WARNING
            ):
                return lines[number:]
        return []


def attempt(case: BadInput, folder: Path) -> Refusal:
    """Try a bad input in a folder of its own, which is the current one."""
    if case.given is not None:
        case.given()
    before = contents(folder)
    done = CliRunner().invoke(main, case.arguments, input=case.typed, env=case.environment)
    left = isinstance(done.exception, SystemExit)
    exception = None if left else done.exception
    return Refusal(done.exit_code, done.stderr, exception, before, contents(folder))


def faults(case: BadInput, refusal: Refusal) -> Iterator[str]:
    """What is wrong with a refusal; nothing when it is as it must be."""
    if refusal.exception is not None or "Traceback" in refusal.errors:
        yield f"a traceback: {refusal.exception!r}"
    if refusal.code != case.code:
        yield f"exit code {refusal.code}, not {case.code}"
    lines = refusal.message
    if not 1 <= len(lines) <= LINES or max(map(len, lines), default=0) > CHARACTERS:
        yield f"a refusal of {[len(line) for line in lines]} characters in its lines"
    for what in (case.place, case.remedy):
        if what not in " ".join(lines):
            yield f"the refusal does not say {what!r}"
    paths = sorted({*refusal.before, *refusal.after})
    for path in paths:
        was, now = refusal.before.get(path), refusal.after.get(path)
        may_come = was is None and any(fnmatch(path, pattern) for pattern in case.leaves)
        if was != now and not may_come:
            yield f"{path} was {was or 'absent'} and is {now or 'absent'}"


def contents(folder: Path) -> dict[str, str]:
    """Path -> kind, size and digest of everything below a folder."""
    return dict(_contents(folder, folder))


def _contents(folder: Path, root: Path) -> Iterator[tuple[str, str]]:
    for entry in os.scandir(folder):
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        if entry.is_symlink():
            yield name, f"a link to {path.readlink()}"
        elif entry.is_dir():
            yield name, "a folder"
            yield from _contents(path, root)
        else:
            content = path.read_bytes()
            yield name, f"{len(content)} bytes, {hashlib.sha256(content).hexdigest()[:16]}"


NESTED = "[" * 100_000 + "]" * 100_000
"""Lists within lists."""

# --- what is done to the prepared folder ----------------------------------------------------------


def write(path: str, content: str | bytes | Mapping[str, Any] | Sequence[Any]) -> Change:
    """Write a file: text, bytes, or values as JSON (as YAML where the name says so)."""

    def change() -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif isinstance(content, str):
            file.write_bytes(content.encode("utf-8", "surrogatepass"))
        elif file.suffix == ".yaml":
            file.write_text(yaml.safe_dump(content), "utf-8")
        else:
            file.write_text(json.dumps(content), "utf-8")

    return change


def edit(path: str, key: str, value: Any = None, *, gone: bool = False) -> Change:
    """Set a dotted key of a JSON or YAML file, or take it away."""

    def change() -> None:
        file = Path(path)
        read = json.loads if file.suffix == ".json" else yaml.safe_load
        tree = read(file.read_text("utf-8"))
        *above, last = key.split(".")
        node = tree
        for name in above:
            node = node[int(name)] if isinstance(node, list) else node[name]
        if gone:
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
        write(path, tree)()

    return change


def remove(*paths: str) -> Change:
    """Take files or folders away."""

    def change() -> None:
        for path in map(Path, paths):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    return change


def write_over(path: str) -> Change:
    """Put a file where a path is, in place of what is there."""
    return all_of(remove(path), write(path, "a file\n"))


def cut(path: str, size: int) -> Change:
    """Cut a file to a size, or by a negative one."""

    def change() -> None:
        os.truncate(path, size if size >= 0 else Path(path).stat().st_size + size)

    return change


def folder_at(path: str) -> Change:
    """Put a folder with a file in it where a path is, in place of what is there."""

    def change() -> None:
        if os.path.lexists(path):
            remove(path)()
        write(f"{path}/in the way", "")()

    return change


def link_at(path: str, to: str) -> Change:
    """Put a symbolic link where a path is, in place of what is there."""

    def change() -> None:
        if os.path.lexists(path):
            remove(path)()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).symlink_to(to)

    return change


def all_of(*changes: Change) -> Change:
    """Do one change after another."""

    def change() -> None:
        for each in changes:
            each()

    return change
