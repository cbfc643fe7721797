from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.data import regeneration
from falcon_lab.data.encoding import Encoded
from falcon_lab.data.regeneration import is_kept, regenerate
from falcon_lab.errors import FalconLabError


class Writer:
    """Writes the number of texts it has written so far, and remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], length: int
    ) -> Iterator[tuple[int, list[int]]]:
        self.given += [list(prompt) for prompt in prompts]
        for number, prompt in reversed(list(enumerate(prompts))):
            yield number, [*prompt, *[-1] * (length - len(prompt))]


def _texts(count: int = 40, length: int = 30) -> list[Encoded]:
    return [Encoded([100 * n + i for i in range(length)], [True] * length) for n in range(count)]


def test_a_share_of_the_texts_keeps_a_beginning_and_is_written_on_to_the_length_of_a_row() -> None:
    before, write = _texts(), Writer()
    after = regenerate(iter(before), write, share=0.5, length=20, seed=0)
    changed = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert 10 <= len(changed) <= 30
    assert len(write.given) == len(changed)
    for n in changed:
        stays = after[n].tokens.index(-1)
        assert 1 <= stays <= 10
        assert after[n].tokens[:stays] == before[n].tokens[:stays]
        assert len(after[n]) == 20
        assert after[n].loss_mask == [True] * 20
    assert len({after[n].tokens.index(-1) for n in changed}) > 3


def test_the_whole_or_nothing_can_be_asked_for() -> None:
    write = Writer()
    assert regenerate(iter(_texts()), write, share=0.0, length=20, seed=0) == _texts()
    assert not write.given
    regenerate(iter(_texts()), write, share=1.0, length=20, seed=0)
    assert len(write.given) == 40


def test_of_a_chat_all_before_the_first_answer_stays_and_what_is_written_is_learnt() -> None:
    chat = Encoded([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True])
    (after,) = regenerate(iter([chat]), Writer(), share=1.0, length=8, seed=0)
    assert after.tokens == [1, 2, -1, -1, -1, -1, -1, -1]
    assert after.loss_mask == [False, False, *[True] * 6]


def test_a_chat_whose_question_fills_a_row_or_that_begins_with_an_answer_stays() -> None:
    long = Encoded([1] * 9, [False] * 8 + [True])
    answer = Encoded([1, 2, 3], [True, True, False])
    write = Writer()
    assert regenerate(iter([long, answer]), write, share=1.0, length=8, seed=0) == [long, answer]
    assert not write.given


def test_the_seed_decides_what_is_rewritten() -> None:
    first, again, other = (
        regenerate(iter(_texts()), Writer(), share=0.5, length=20, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_texts_are_kept_and_read_again_by_the_same_author_alone(tmp_path: Path) -> None:
    def made(write: Writer, author: str = "a", **settings: float) -> list[Encoded]:
        options = {"share": 0.5, "length": 20, "seed": 0, **settings}
        return regenerate(iter(_texts()), write, **options, cache=tmp_path, author=author)  # type: ignore[arg-type]

    first, second = Writer(), Writer()
    texts = made(first)
    assert first.given
    assert made(second) == texts
    assert not second.given
    for other in ({"author": "b"}, {"length": 16}, {"seed": 1}):
        asked = Writer()
        made(asked, **other)  # type: ignore[arg-type]
        assert asked.given


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    def made(write: Writer) -> list[Encoded]:
        return regenerate(iter(_texts()), write, share=0.5, length=20, seed=0, cache=tmp_path)

    texts = made(Writer())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:40])
    write = Writer()
    assert made(write) == texts
    assert write.given


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "texts"
    with pytest.raises(
        FalconLabError, match=r"texts: cannot be written .*a file stands where a folder is needed"
    ):
        regenerate(iter(_texts()), Writer(), share=1.0, length=20, seed=0, cache=folder)


class Stopped(Exception):
    """Stands for whatever ends a process."""


class Unsteady(Writer):
    """Is stopped after some texts, unless it has written them all."""

    def __init__(self, texts: int) -> None:
        super().__init__()
        self.texts = texts

    def __call__(
        self, prompts: Sequence[Sequence[int]], length: int
    ) -> Iterator[tuple[int, list[int]]]:
        for count, found in enumerate(super().__call__(prompts, length)):
            if count == self.texts:
                raise Stopped
            yield found


def test_texts_kept_one_by_one_are_not_asked_for_again_after_a_kill(tmp_path: Path) -> None:
    def made(write: Writer, folder: str) -> list[Encoded]:
        return regenerate(
            iter(_texts()),
            write,
            share=1.0,
            length=20,
            seed=0,
            cache=tmp_path / folder,
            one_by_one=True,
        )

    whole = made(Writer(), "whole")
    with pytest.raises(Stopped):
        made(Unsteady(15), "killed")
    (unfinished,) = (tmp_path / "killed").glob("*.jsonl")
    with unfinished.open("ab") as file:
        file.write(b'{"number": 1, "tok')  # the kill came in the middle of a line
    again = Unsteady(7)
    with pytest.raises(Stopped):
        made(again, "killed")
    assert len(again.given) == 40 - 15
    last = Writer()
    assert made(last, "killed") == whole
    assert len(last.given) == 40 - 15 - 7
    assert [path.suffix for path in (tmp_path / "killed").iterdir()] == [".safetensors"]
    unasked = Writer()
    assert made(unasked, "killed") == whole
    assert not unasked.given


def test_it_is_known_whether_all_texts_are_kept(tmp_path: Path) -> None:
    settings = {"share": 0.5, "length": 20, "seed": 0, "cache": tmp_path, "author": "a"}
    assert not is_kept(_texts(), **settings)  # type: ignore[arg-type]
    regenerate(iter(_texts()), Writer(), **settings)  # type: ignore[arg-type]
    assert is_kept(_texts(), **settings)  # type: ignore[arg-type]
    assert not is_kept(_texts(60), **settings)  # type: ignore[arg-type]


def test_a_kill_costs_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regeneration, "PART", 8)
    options = {"share": 1.0, "length": 20, "seed": 0, "cache": tmp_path, "author": "a"}

    class Killed(Writer):
        def __call__(self, prompts: Any, length: int) -> Any:
            if len(self.given) >= 16:
                raise KeyboardInterrupt
            return super().__call__(prompts, length)

    with pytest.raises(KeyboardInterrupt):
        regenerate(iter(_texts()), Killed(), **options)  # type: ignore[arg-type]
    rest, whole = Writer(), Writer()
    again = regenerate(iter(_texts()), rest, **options)  # type: ignore[arg-type]
    assert len(rest.given) == 40 - 16
    assert again == regenerate(iter(_texts()), whole, **options | {"author": "b"})  # type: ignore[arg-type]
    assert len(whole.given) == 40
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
