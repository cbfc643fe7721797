"""The history file."""

from __future__ import annotations

from pathlib import Path

import torch

from falcon_lab.history import HistoryLogger, read_history, series


def test_metrics_are_appended_and_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "history.jsonl"
    HistoryLogger(path).log_metrics({"train/loss": torch.tensor(2.0)}, step=1)
    resumed = HistoryLogger(path)
    resumed.log_metrics({"train/loss": 1.5}, step=2)
    assert read_history(path) == [
        {"step": 1, "train/loss": 2.0},
        {"step": 2, "train/loss": 1.5},
    ]


def test_a_line_cut_off_by_a_kill_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    logger = HistoryLogger(path)
    logger.log_metrics({"a": 1.0}, step=1)
    with path.open("ab") as file:
        file.write(b'{"step": 2, "a"')
    logger.log_metrics({"a": 3.0}, step=3)
    assert read_history(path) == [{"step": 1, "a": 1.0}, {"step": 3, "a": 3.0}]


def test_a_trainer_writes_its_curves(tmp_path: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = HistoryLogger(tmp_path / "history.jsonl")
    trainer = lightning.Trainer(
        max_steps=4,
        logger=logger,
        log_every_n_steps=2,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Line(), DataLoader([torch.ones(1)] * 4))
    history = read_history(logger.path)
    assert [record["step"] for record in history] == [1, 3]
    assert history[1]["train/loss"] <= history[0]["train/loss"]


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


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "absent.jsonl") == []


def test_a_series_holds_the_steps_at_which_it_was_logged() -> None:
    history = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": 0.5}]
    assert series(history, "a") == ([1, 3], [1.0, 0.5])
