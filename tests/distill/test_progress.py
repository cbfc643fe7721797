from pathlib import Path

import pytest

from distilling import QUIET, Data, Notes, distillation
from falcon_lab.distill.training import train


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
