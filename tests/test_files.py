from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.files import (
    about,
    check_place,
    check_text,
    keep_former,
    locked,
    make_folder,
    make_once,
    remove_leftovers,
    replacing,
    write_atomically,
)


def test_what_was_written_takes_the_place_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
        assert temporary.suffix == path.suffix
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_after_an_error_the_old_file_is_there_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_none_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(OSError, match="Not a directory"),
        replacing(tmp_path / "file" / "figures.json") as temporary,
    ):
        temporary.write_text("new")


def test_what_was_there_survives_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomically(tmp_path / "results.json", "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FalconLabError, match="No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(FalconLabError, match="cannot be written"):
        write_atomically(tmp_path / "runs" / "results.json", "new")


# --- what the operating system says ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "not read-only"),
        (errno.ENAMETOOLONG, "shorter name"),
        (errno.ENOTDIR, "a file stands where a folder is needed"),
        (errno.EISDIR, "a folder stands where a file is needed"),
        (errno.ELOOP, "link"),
    ],
)
def test_what_the_system_says_has_path_reason_and_remedy(code: int, remedy: str) -> None:
    with pytest.raises(FalconLabError) as caught, about(Path("runs/a")):
        raise OSError(code, os.strerror(code))
    assert str(caught.value).startswith(f"runs/a: cannot be written ({os.strerror(code)}); ")
    assert remedy in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_path_in_the_error_is_nearer_than_the_path_of_the_block() -> None:
    with pytest.raises(FalconLabError, match=r"^runs/a/b: cannot be read"), about("runs", "read"):
        raise PermissionError(errno.EACCES, "Permission denied", "runs/a/b")


def test_a_library_may_say_it_in_its_own_error() -> None:
    with (
        pytest.raises(FalconLabError, match=r"No space left on device.*make room"),
        about("w", also=(RuntimeError,)),
    ):
        raise RuntimeError("io error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError), about("w"):
        raise RuntimeError("a bug")


def test_a_closed_pipe_is_not_the_path_s_fault() -> None:
    with pytest.raises(BrokenPipeError), about("w"):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_name_with_nul_is_refused_before_it_is_used() -> None:
    with pytest.raises(FalconLabError, match="NUL"):
        make_folder(Path("a\0b"))


def hash_of(folder: Path) -> list[str]:
    return sorted(f"{path}:{path.lstat().st_mtime_ns}" for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file/deeper", "a file stands where a folder is needed"),
        ("file", "a file stands where a folder is needed"),
        ("x" * 300, "shorter name"),
        ("dangling", "leads to nothing"),
        ("dangling/deeper", "leads to nothing"),
        ("loop", "link"),
        ("a\0b", "NUL"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_touched(
    tmp_path: Path, place: str, said: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = hash_of(tmp_path)
    with pytest.raises(FalconLabError) as caught:
        check_place(tmp_path / place, folder=True)
    assert said in str(caught.value)
    assert hash_of(tmp_path) == before


def test_a_place_that_is_free_or_there_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("there")
    check_place(tmp_path, folder=True)
    check_place(tmp_path / "new" / "deeper", folder=True)
    check_place(tmp_path / "file", folder=False)
    with pytest.raises(FalconLabError, match="a folder stands where a file"):
        check_place(tmp_path, folder=False)
    assert not (tmp_path / "new").exists()


def test_half_a_character_is_named_with_its_place() -> None:
    assert check_text("né😀", "x") == "né😀"
    with pytest.raises(FalconLabError, match=r"chats\.jsonl:3: character 3 is '\\ud83d'"):
        check_text("ab\ud83d", "chats.jsonl:3")


def test_former_results_get_the_next_free_number(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert keep_former(path) is None
    for number in (1, 2):
        path.write_text(str(number))
        assert keep_former(path) == tmp_path / f"results.{number}.json"
    assert (tmp_path / "results.1.json").read_text() == "1"
    assert not path.exists()


def test_a_lock_is_held_against_others_and_given_back(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with (
        locked(lock, busy=None),
        pytest.raises(FalconLabError, match="in use"),
        locked(lock, busy="in use"),
    ):
        pass
    with locked(lock, busy="in use"):
        pass
    lock.unlink()
    lock.mkdir()
    with pytest.raises(FalconLabError, match="folder stands"), locked(lock, busy="in use"):
        pass


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".123.results.json", ".lock", ".12.d", "results.json", ".env.1"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".7.folder").mkdir()
    remove_leftovers(tmp_path, tmp_path / "missing")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", ".env.1", "results.json", ".7.folder"}


def test_a_link_that_leads_nowhere_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    with pytest.raises(FalconLabError, match=r"the link .*runs leads to nothing"):
        make_folder(tmp_path / "runs")


def test_a_file_in_place_of_what_is_made_once_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(FalconLabError, match="a file stands where a folder is needed"):
        make_once(tmp_path / "model", Path.mkdir, is_finished=lambda folder: False)
    assert (tmp_path / "model").read_text() == "mine"


def test_what_belongs_to_a_former_file_gets_the_same_number(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "report.html"
    for name in ("results.json", "report.html", "report.1.html"):
        (tmp_path / name).write_text(name)
    assert keep_former(results, page, tmp_path / "answers") == tmp_path / "results.2.json"
    assert (tmp_path / "report.2.html").read_text() == "report.html"
