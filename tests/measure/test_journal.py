"""The file that a measurement's answers are kept in."""

from __future__ import annotations

from pathlib import Path

from falcon_lab.measure.journal import Journal
from falcon_lab.measure.records import Answer
from measuring import row

FACTS = {"target": "tiny", "prompts": ["a", "b"]}


def turns(wall: float = 1.0) -> list[Answer]:
    return row("x", wall=wall, accepted=[2, 0], tokens=[1, 2, 3, 4]).turns


def journal(folder: Path) -> Journal:
    return Journal.open(folder, "compare", FACTS)


def test_what_was_answered_is_read_by_the_next_process(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.add(0, "p", "plain", turns(2.0))
    first.add(0, "p", "tree", turns(1.0))
    found = journal(tmp_path).group(0, "p", ["plain", "tree"])
    assert found == {"plain": turns(2.0), "tree": turns(1.0)}
    assert len(journal(tmp_path)) == 2
    assert journal(tmp_path).group(1, "p", ["plain", "tree"]) is None


def test_a_prompt_that_lacks_a_method_is_measured_again_as_a_whole(tmp_path: Path) -> None:
    journal(tmp_path).add(0, "p", "plain", turns(9.0))  # and was killed
    second = journal(tmp_path)
    second.add(0, "p", "tree", turns(1.0))
    assert journal(tmp_path).group(0, "p", ["plain", "tree"]) is None  # of two processes
    second.add(0, "p", "plain", turns(3.0))
    found = journal(tmp_path).group(0, "p", ["plain", "tree"])
    assert found == {"plain": turns(3.0), "tree": turns(1.0)}


def test_another_measurement_has_a_file_of_its_own(tmp_path: Path) -> None:
    same = Journal.open(tmp_path, "compare", dict(reversed(FACTS.items())))
    other = Journal.open(tmp_path, "compare", FACTS | {"target": "other"})
    assert same.path == journal(tmp_path).path != other.path
    assert Journal.open(tmp_path, "tune", FACTS).path != same.path


def test_nothing_is_written_before_there_is_something_to_keep(tmp_path: Path) -> None:
    opened = journal(tmp_path)
    assert not opened.path.exists()
    opened.add_facts("tree", {"block": 2})
    opened.add_difference("ab12", 0.25, None)
    opened.add_difference("cd34", 0.5, 0.75)
    assert opened.path.read_text("utf-8").startswith('{"facts": {"prompts"')
    again = journal(tmp_path)
    assert again.facts() == opened.facts() == {"tree": {"block": 2}}
    assert [again.difference(key) for key in ("ab12", "cd34", "ef56")] == [
        (0.25, None),
        (0.5, 0.75),
        None,
    ]


def test_a_look_at_the_memory_is_kept_too_even_where_nothing_was_seen(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.add_peak("tree", 4096)
    first.add_peak("plain", None)
    assert journal(tmp_path).peaks() == first.peaks() == {"tree": 4096, "plain": None}
