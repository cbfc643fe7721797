"""JSON lines that survive a kill."""

from __future__ import annotations

from pathlib import Path

from falcon_lab.files import append_line, read_lines


def test_records_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.jsonl"
    for number in range(3):
        append_line(path, {"n": number})
    assert list(read_lines(path)) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_line_that_a_kill_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    append_line(path, {"n": 0})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"n": 1, "te')
    append_line(path, {"n": 2})
    assert list(read_lines(path)) == [{"n": 0}, {"n": 2}]


def test_what_is_no_record_is_left_out_and_no_file_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('[1]\n\n{"n": 1}\n')
    assert list(read_lines(path)) == [{"n": 1}]
