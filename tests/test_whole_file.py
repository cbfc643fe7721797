from __future__ import annotations

import os
from pathlib import Path

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.files import replacing, write_atomically


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
