"""Trains experiments as a process of several that share a target.

One is trained, with the drafter whole everywhere and with a part of it everywhere, each is trained
again from the checkpoint before its last one, and another follows, whose layers are divided.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from falcon_lab import experiment
from falcon_lab.config.load import load_experiment
from falcon_lab.environment import is_worker

SMALL = [
    *("stages=[target,data,distil]", "wandb.mode=disabled", "target.name=target"),
    *("data.documents=4", "data.length=64", "data.validation=4", "distillation.noise=0"),
    *("drafter.name=falcon", "drafter.block=1", "drafter.dropout=0", "glancing.name=none"),
    *("distillation.checkpoint_every=2", "trainer.max_steps=4", "trainer.log_every_n_steps=1"),
    *("trainer.accelerator=cpu", "trainer.enable_progress_bar=false"),
    *("trainer.val_check_interval=4", "trainer.check_val_every_n_epoch=null"),
]
"""Nothing in it is random but the first weights, so that who reads a sequence does not matter."""
SHARED = ["trainer.devices=2", "trainer.strategy.name=model_parallel", "data.batch_size=2"]


def trained(folder: Path, *more: str) -> list[str]:
    """Run the training of an experiment in a folder: what it said."""
    said: list[str] = []
    chosen = load_experiment(None, [f"out={folder}", *SMALL, *more])
    experiment.run(chosen, announce=said.append)
    return said


def killed(folder: Path) -> None:
    """Have a finished training be one that was killed after its last checkpoint but one."""
    (folder / "checkpoints" / "last.ckpt").unlink()
    shutil.rmtree(folder / "drafter")


def again(folder: str, copy: str, *settings: str) -> None:
    """A copy of a run that was killed and went on."""
    if not is_worker():
        shutil.copytree(folder, copy)
        killed(Path(copy))
    torch.distributed.barrier()
    trained(Path(copy), *settings)


def together() -> None:
    """The runs ``sharded`` and ``parts``, copies that were killed and went on, and ``divided``."""
    parts = [*SHARED, "trainer.strategy.drafter=sharded"]
    sys.stdout.write("\n".join(trained(Path("sharded"), *SHARED)))
    again("sharded", "resumed", *SHARED)
    trained(Path("parts"), *parts)
    again("parts", "resumed-parts", *parts)
    trained(Path("divided"), *SHARED, "trainer.strategy.tensor_parallel_size=2")


if __name__ == "__main__":
    sys.exit(together())
