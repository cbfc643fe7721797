"""Files that survive a kill: written whole or not at all, or line by line; and the cache folder.

What the operating system says about a path becomes a ``FalconLabError`` here and nowhere else: with
the path, the reason, and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from falcon_lab.errors import FalconLabError, one_line

# --- what the operating system says -------------------------------------------------------------

FULL = "make room and run the same command again; nothing that was there is lost"
IN_THE_WAY = "a file stands where a folder is needed; move it or choose another place"
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: FULL,
    errno.EACCES: "change its permissions or choose another place",
    errno.EPERM: "change its permissions or choose another place",
    errno.EROFS: "choose a place that is not read-only",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: IN_THE_WAY,
    errno.EEXIST: IN_THE_WAY,
    errno.EISDIR: "a folder stands where a file is needed; move it or choose another place",
    errno.ELOOP: "a link leads back to itself; remove it or choose another place",
    errno.EMFILE: "close some programs, or raise the limit with ulimit -n",
    errno.ENFILE: "close some programs, or raise the limit with ulimit -n",
    errno.EIO: "the disk may be damaged; choose another place",
}
"""Error of the operating system -> what to do about it."""


@contextmanager
def about(
    path: Path | str, purpose: str = "written", *, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn what is raised about a path inside the block into a ``FalconLabError``.

    Args:
        path: is named where the error names no path itself.
        purpose: what could not be done: ``written`` or ``read``.
        also: errors by which a library says that a file cannot be written or read.
    """
    if "\0" in str(path):
        raise FalconLabError(f"{str(path)!r}: the name holds a NUL character; choose another")
    try:
        yield
    except (ConnectionError, TimeoutError):  # of a pipe or a lock, not of the file system
        raise
    except Exception as error:
        if not isinstance(error, (OSError, UnicodeEncodeError, *also)):
            raise
        raise FalconLabError(explain(error, Path(path), purpose)) from error


def explain(error: Exception, path: Path | None = None, purpose: str = "written") -> str:
    """Return the path, what is wrong with it, and what to do.

    Args:
        error: an ``OSError``, or what a library raised for one.
        path: is named where the error names none.
        purpose: what could not be done.
    """
    named = getattr(error, "filename", None)
    place = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else path
    code, reason = _code_and_reason(error)
    remedy = REMEDIES.get(code)
    if place is not None and (code == errno.ENOENT or _leads_nowhere(place)):
        remedy = _missing(place, purpose)
    if place is not None and cache_folder() in place.parents:
        remedy = f"{remedy or 'look at it'}; FALCON_LAB_CACHE sets another folder"
    where = "" if place is None else f"{place}: "
    return f"{where}cannot be {purpose} ({reason})" + (f"; {remedy}" if remedy else "")


def _code_and_reason(error: Exception) -> tuple[int, str]:
    """Return the error number and its text, also where a library has put both into a message."""
    if isinstance(error, OSError) and error.errno:
        return error.errno, error.strerror or os.strerror(error.errno)
    message = one_line(error)
    for code in REMEDIES:
        if os.strerror(code).lower() in message.lower():
            return code, os.strerror(code)
    return 0, message


def _missing(path: Path, purpose: str) -> str:
    """Return what to do where a path, or the folder that it is in, is not there."""
    for each in (path, *path.parents):
        if _leads_nowhere(each):
            return f"the link {each} leads to nothing; remove it or choose another place"
    return "name one that is there" if purpose == "read" else "choose another place"


def _leads_nowhere(path: Path) -> bool:
    """Return whether a path is a link to what is not there; one to itself is no such link."""
    try:
        return path.is_symlink() and not path.exists()
    except OSError:
        return False


def check_place(path: Path, *, folder: bool) -> None:
    """Refuse a place where nothing could be written, without touching anything.

    Args:
        path: of the file or folder, which may be there or not.
        folder: whether it is to be a folder.

    Raises:
        FalconLabError: a name that cannot be, something of another kind in the way, or no
            permission.
    """
    with about(path):
        for each in (path, *path.absolute().parents):
            if os.path.lexists(each) or _refused(each):
                break
        each.stat()  # of a dangling link, a loop, or below a file: the system's own error
        if (folder or each != path) and not each.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each))
        if not folder and each == path and each.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(each))
        if not os.access(each, os.W_OK | (os.X_OK if each.is_dir() else 0)):
            read_only = os.statvfs(each).f_flag & os.ST_RDONLY
            code = errno.EROFS if read_only else errno.EACCES
            raise OSError(code, os.strerror(code), str(each))


def _refused(path: Path) -> bool:
    """Return whether the system refuses the name itself, and not because nothing is there."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


# --- text ---------------------------------------------------------------------------------------


def check_text(text: str, where: str) -> str:
    """Return a text that can be written down, tokenized and shown: one without half characters.

    A lone surrogate is half a character: what JSON's ``"\\ud83d"`` leaves where a chat was cut in
    the middle of an emoji, or a byte from a terminal that is no UTF-8.

    Raises:
        FalconLabError: naming ``where`` and the place in the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FalconLabError(
            f"{where}: character {error.start + 1} is {text[error.start]!a}, half of a "
            "surrogate pair and no character of its own; remove it or write the text as UTF-8"
        ) from None
    return text


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path`` to write to; the file replaces ``path`` when all went well.

    Readers see the old file or the new one. After an error the old one is still there and the
    other is removed. Each process has a name of its own, which ends as ``path`` does.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def remove_leftovers(*folders: Path) -> None:
    """Remove the temporary files of processes that were killed; a lock keeps living ones away."""
    for folder in folders:
        for path in folder.glob(".[0-9]*.*"):
            if path.name.split(".")[1].isdigit():  # as ``replacing`` names them
                with suppress(OSError):
                    path.unlink()


def make_folder(path: Path) -> Path:
    """Make a folder and those around it; one that is there stays as it is.

    Raises:
        FalconLabError: it cannot be made.
    """
    with about(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_whole(
    path: Path, write: Callable[[Path], object], *, also: tuple[type[Exception], ...] = ()
) -> Path:
    """Write a file under a temporary name and rename it: readers see the old or the new one.

    Args:
        path: the file; the folders around it are made.
        write: is called with the temporary name.
        also: errors by which ``write`` says that it cannot.

    Raises:
        FalconLabError: when the disk is full or the folder cannot be written.
    """
    make_folder(path.parent)
    with about(path, also=also), replacing(path) as temporary:
        write(temporary)
    return path


def write_atomically(path: Path, text: str) -> Path:
    """Write ``text`` as ``write_whole`` does, and have the system put it on the disk.

    Raises:
        FalconLabError: when the disk is full or the folder cannot be written.
    """

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    return write_whole(path, write)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record, in a line of its own even where a kill cut off the one before.

    Raises:
        FalconLabError: it cannot be written.
    """
    make_folder(path.parent)
    with about(path), path.open("ab+") as file:
        if _cut_off(file):
            file.write(b"\n")  # costs that line alone
        file.write(json.dumps(record).encode() + b"\n")


def write_behind(path: Path, size: int, content: bytes) -> int:
    """Write behind the first ``size`` bytes of a file, in place of what a kill has left there.

    Returns:
        The bytes that the file then has.

    Raises:
        FalconLabError: it cannot be written.
    """
    make_folder(path.parent)
    with about(path), path.open("r+b" if path.exists() else "x+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return size + len(content)


def keep_former(path: Path, *beside: Path) -> Path | None:
    """Rename a file or folder that is there to ``results.1.json``, or the next number that is free.

    Args:
        path: the file or folder.
        beside: what belongs to it and gets the same number. It is renamed before it, so that after
            a kill the same call keeps the rest.

    Returns:
        The new name of ``path``; None where nothing was there.

    Raises:
        FalconLabError: one cannot be renamed.
    """

    def numbered(each: Path, number: int) -> Path:
        return each.with_name(f"{each.stem}.{number}{each.suffix}")

    there = [each for each in (*beside, path) if os.path.lexists(each)]
    free = next(n for n in count(1) if not any(os.path.lexists(numbered(p, n)) for p in there))
    with about(path):
        for each in there:
            each.rename(numbered(each, free))
    return numbered(path, free) if path in there else None


@contextmanager
def locked(path: Path, *, busy: str | None) -> Iterator[None]:
    """Hold a lock that other processes respect, in a file of its own.

    Args:
        path: the lock's file.
        busy: what to say where another process holds it; None waits for it.

    Raises:
        FalconLabError: the file cannot be written, or ``busy``.
    """
    lock = FileLock(path, timeout=-1 if busy is None else 0)
    try:
        with about(path):
            lock.acquire()
    except Timeout:
        raise FalconLabError(busy) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claimed(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock while a piece of work is done, in a file that is gone afterwards.

    Two processes may hold it where one begins as another gives up: the work must bear that.

    Args:
        path: the lock's file.
        wait: until another process has released it.

    Yields:
        Whether it is held.

    Raises:
        FalconLabError: the file cannot be written.
    """
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        with about(path):
            lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()


# --- the cache ----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return ``$FALCON_LAB_CACHE``, ``$XDG_CACHE_HOME/falcon-lab`` or ``~/.cache/falcon-lab``.

    Raises:
        FalconLabError: it begins with ``~``, and there is no such home.
    """
    chosen, base = os.environ.get("FALCON_LAB_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "falcon-lab"
    except RuntimeError as error:
        asked = f"{'FALCON_LAB_CACHE' if chosen else 'XDG_CACHE_HOME'}={chosen or base or ''}"
        raise FalconLabError(
            f"{asked}: there is no such home folder; set FALCON_LAB_CACHE to a folder for models "
            "and texts"
        ) from error


def cached(kind: str, name: str, fingerprint: str) -> Path:
    """Return the place in the cache of what ``name`` and ``fingerprint`` stand for.

    Args:
        kind: the folder in the cache.
        name: of any characters and length.
        fingerprint: tells it from others of that name.
    """
    label = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:LONGEST_LABEL]
    return cache_folder() / kind / f"{label}-{fingerprint}"


LONGEST_LABEL = 80
"""Characters of a name that are kept in the cache."""


def make_once(
    folder: Path, make: Callable[[Path], object], *, is_finished: Callable[[Path], bool]
) -> None:
    """Make a folder under another name and rename it, unless it is there.

    Two processes never both make it. In a distributed training the first process of each machine
    does, and the others wait.

    Args:
        folder: what is made.
        make: is called with the other name; what a killed attempt left there is there still.
        is_finished: tells whether a folder is whole; one that is not is handed to ``make``.

    Raises:
        FalconLabError: what the system says about the folder.
    """
    # A launcher ends us if the first one fails.
    while not _first_of_machine() and not is_finished(folder):
        time.sleep(0.2)
    if is_finished(folder):
        return
    make_folder(folder.parent)
    with locked(folder.with_name(f"{folder.name}.lock"), busy=None), about(folder):
        if is_finished(folder):
            return
        partial = folder.with_name(folder.name + ".partial")
        for place in (folder, partial):
            check_place(place, folder=True)
        if folder.exists():  # damaged since: what is whole in it is kept
            shutil.rmtree(partial, ignore_errors=True)
            folder.rename(partial)
        make(partial)
        partial.rename(folder)


def _first_of_machine() -> bool:
    """Return whether this is the first process on its machine of a distributed training."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


# --- reading ------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every whole record; what a kill cut off is left out, and a missing file is empty."""
    if not path.exists():
        return
    with about(path, "read"), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _cut_off(file: Any) -> bool:
    """Return whether the file's last line has no end."""
    if file.seek(0, 2) == 0:
        return False
    file.seek(-1, 2)
    return bool(file.read(1) != b"\n")


def refuse_strangers(path: Path, purpose: str) -> None:
    """Refuse a path that belongs neither to this user nor to the system's administrator.

    Nothing is checked where the system knows no owners, or where nothing is there.

    Args:
        path: what is about to be trusted.
        purpose: what would happen to it, as in ``run as you``.

    Raises:
        FalconLabError: with the path and its owner.
    """
    if not hasattr(os, "geteuid"):
        return
    with about(path, "read"):
        try:
            owner = path.stat().st_uid
        except FileNotFoundError:
            return
    if owner not in (os.geteuid(), 0):
        raise FalconLabError(
            f"{path}: belongs to user {owner} and would be {purpose}; delete it if it is yours to "
            "delete, or set FALCON_LAB_CACHE to a folder of your own"
        )
