"""The training loop: checkpoints, the progress bar, the learning rate."""

import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from distilling import QUIET, Data, Notes, distillation, weights
from falcon_lab.config.schema import OptimizerConfig
from falcon_lab.distill.module import Distillation
from falcon_lab.errors import FalconLabError
from falcon_lab.training import (
    LAST,
    PREVIOUS,
    KeepLastTwo,
    find_checkpoint,
    lr_factor,
    train,
)


def _step(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def _train(folder: Path, steps: int = 6, every: int = 2, **trainer: Any) -> Distillation:
    module = distillation()
    arguments = {**QUIET, "max_steps": steps, **trainer}
    train(module, Data(list(range(30))), arguments, folder, None, every)
    return module


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_the_newest_checkpoint_and_the_one_before_are_kept(tmp_path: Path) -> None:
    _train(tmp_path)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [LAST, PREVIOUS]
    assert (_step(folder / LAST), _step(folder / PREVIOUS)) == (6, 4)
    assert find_checkpoint(folder) == folder / LAST


def test_the_end_is_saved_whether_or_not_it_is_due(tmp_path: Path) -> None:
    _train(tmp_path, steps=5)
    assert _step(tmp_path / "checkpoints" / LAST) == 5


def test_nothing_is_saved_between_the_micro_batches_of_a_step(tmp_path: Path) -> None:
    saved = []

    class Watched(KeepLastTwo):
        def _save(self, trainer: Trainer) -> None:
            saved.append((trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx))
            super()._save(trainer)

    module = distillation()
    trainer = Trainer(
        **{**QUIET, "accumulate_grad_batches": 3, "logger": False},
        default_root_dir=tmp_path,
        callbacks=[Watched(tmp_path / "checkpoints", 2)],
    )
    trainer.fit(module, datamodule=Data(list(range(30))))
    assert saved == [(2, 5), (4, 11), (6, 17)]


@pytest.mark.parametrize("damage", ["cut", "empty", "missing"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    whole = _train(tmp_path / "whole")
    _train(tmp_path / "damaged", steps=4)
    last = tmp_path / "damaged" / "checkpoints" / LAST
    if damage == "cut":
        _cut(last)
    elif damage == "empty":
        last.write_bytes(b"")
    else:
        last.unlink()  # killed between the two renames
    if damage == "missing":
        assert find_checkpoint(last.parent) == last.parent / PREVIOUS
    else:
        with pytest.warns(UserWarning, match="damaged"):
            assert find_checkpoint(last.parent) == last.parent / PREVIOUS
    resumed = _train(tmp_path / "damaged")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name])


def test_with_no_readable_checkpoint_the_training_does_not_start_afresh_in_silence(
    tmp_path: Path,
) -> None:
    _train(tmp_path)
    for name in (LAST, PREVIOUS):
        _cut(tmp_path / "checkpoints" / name)
    with pytest.raises(FalconLabError, match="delete"):
        find_checkpoint(tmp_path / "checkpoints")


def test_a_checkpoint_of_something_else_is_named(tmp_path: Path) -> None:
    _train(tmp_path)
    folder = tmp_path / "checkpoints"
    own = torch.load(folder / LAST, weights_only=True)
    shape = {name: tensor[..., :1] for name, tensor in own["state_dict"].items()}
    for content, said in (
        ([1, 2], "no checkpoint of a training"),
        ({"state_dict": own["state_dict"]}, "no checkpoint of a training"),
        (own | {"state_dict": {}}, "of another training: its weights have other names"),
        (own | {"state_dict": shape}, "of another training: .* has another shape"),
    ):
        for name in (LAST, PREVIOUS):
            torch.save(content, folder / name)
        with pytest.raises(FalconLabError, match=f"last.ckpt is {said}.*delete"):
            _train(tmp_path)


def test_a_new_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "none") is None


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Evil()}, tmp_path / LAST)
    with pytest.raises(FalconLabError, match="damaged"):
        find_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_stops_the_training_and_spares_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer.save_checkpoint

    def fill_up(trainer: Trainer, path: Path, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step < 4:
            return save(trainer, path, *args, **kwargs)
        Path(path).write_bytes(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "save_checkpoint", fill_up)
    with pytest.raises(
        FalconLabError,
        match=r"step 4: .*No space left.*make room.*the checkpoint before it is kept",
    ):
        _train(tmp_path)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == [LAST]
    assert _step(folder / LAST) == 2
    monkeypatch.undo()
    resumed, whole = _train(tmp_path), _train(tmp_path / "whole")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name])


def test_a_finished_training_is_not_trained_again(tmp_path: Path) -> None:
    done = weights(_train(tmp_path))
    again = _train(tmp_path)
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, done[name])
    assert _step(tmp_path / "checkpoints" / PREVIOUS) == 4


# --- the progress bar and the learning rate -----------------------------------------------------


@pytest.mark.parametrize(
    ("said", "lost"), [("[/a/gloo/transport/tcp/pair.cc:537] Read error", True), ("odd", False)]
)
def test_a_training_whose_other_process_left_says_so_and_nothing_else_is_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, lost: bool
) -> None:
    def broken(self: Any, batch: Any, batch_idx: int) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(Distillation, "training_step", broken)
    with pytest.raises(FalconLabError if lost else RuntimeError, match=None if lost else "odd"):
        _train(tmp_path)


def test_a_training_shows_a_bar_without_epochs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**QUIET, "max_steps": 6, "enable_progress_bar": True}
    train(distillation(max_steps=6), Data(list(range(6))), settings, tmp_path, Notes(), 0)
    written = "".join(capfd.readouterr())
    assert "Training" in written
    assert "6/6" in written
    assert "Epoch" not in written
    assert "v_num" not in written


@pytest.mark.parametrize(
    ("limits", "bar"),
    [({"max_epochs": -1}, "Training"), ({"max_epochs": 1}, "Epoch 0")],
)
def test_a_resumed_training_shows_a_bar_that_begins_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], limits: dict[str, int], bar: str
) -> None:
    for shown in (False, True):
        settings = {**QUIET, **limits, "enable_progress_bar": shown}
        train(distillation(max_steps=6), Data(list(range(6))), settings, tmp_path, Notes(), 2)
        (tmp_path / "checkpoints" / LAST).unlink()  # there is the one of the fourth step
    lines = "".join(capfd.readouterr()).splitlines()
    assert any(line.startswith(f"{bar}: 100%") and "6/6" in line for line in lines)
    assert not any("/?" in line for line in lines)


def test_a_bar_counts_batches_of_which_several_are_a_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**QUIET, "max_steps": 3, "enable_progress_bar": True, "accumulate_grad_batches": 2}
    train(distillation(max_steps=3), Data(list(range(6))), settings, tmp_path, Notes(), 0)
    assert "6/6" in "".join(capfd.readouterr())


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    config = OptimizerConfig(warmup_steps=4, final_lr=0.1)
    factors = [lr_factor(step, 20, config) for step in range(21)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[12] == pytest.approx(0.55)
    assert factors[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[4:]))
    assert lr_factor(99, 20, config) == pytest.approx(0.1)
