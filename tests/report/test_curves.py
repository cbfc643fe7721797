"""Reading training curves back."""

from __future__ import annotations

from pathlib import Path

from falcon_lab.report.history import read_history, series


def test_lines_of_one_step_are_put_together_and_later_ones_win(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(
        '{"step": 1, "train/loss": 3.0}\n{"step": 2, "train/loss": 2.0}\n'
        '{"step": 2, "val/loss": 2.5}\n{"step": 1, "train/loss": 2.9}\n'
    )
    assert read_history(path) == [
        {"step": 1, "train/loss": 2.9},
        {"step": 2, "train/loss": 2.0, "val/loss": 2.5},
    ]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2, "a": 1.\n[1]\n{"step": 3, "a": \xff')
    assert read_history(path) == [{"step": 1, "a": 1.0}]


def test_lightnings_csv_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,train/loss,val/loss\n0,9,1.5,\n0,9,,1.75\n1,19,1.25,\n")
    assert read_history(path) == [
        {"epoch": 0.0, "step": 9, "train/loss": 1.5, "val/loss": 1.75},
        {"epoch": 1.0, "step": 19, "train/loss": 1.25},
    ]


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "absent.jsonl") == []


def test_a_series_holds_the_steps_at_which_it_was_logged() -> None:
    history = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": 0.5}]
    assert series(history, "a") == ([1, 3], [1.0, 0.5])
