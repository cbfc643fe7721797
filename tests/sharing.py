"""Trains experiments as a process of several that share a target.

One is trained, with the drafter whole everywhere and with a part of it everywhere, each is trained
again from the checkpoint before its last one, and another follows, whose layers are divided.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from falcon_lab import experiment
from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import TargetConfig
from falcon_lab.environment import is_worker
from falcon_lab.model.loading import load_target
from falcon_lab.model.target import Target
from falcon_lab.model_parallel import DATA, TENSOR, share_target

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


@torch.no_grad()
def seen() -> bool:
    """Whether the layers of a shared target can be read, as EAGLE-3 and DFlash do."""
    states = []
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=(DATA, TENSOR))
    for shared in (False, True):
        target = load_target(TargetConfig(name="target", device="cpu"))
        if shared:
            share_target(target, grid)
        tokens = torch.arange(5)[None]
        found = target.backbone.base(input_ids=tokens, output_hidden_states=True)
        states.append(torch.stack(found.hidden_states))
        kept = all(isinstance(weight, DTensor) for weight in layers_of(target).parameters())
        assert kept == shared
    return torch.allclose(*states)


def layers_of(target: Target) -> torch.nn.Module:
    """The decoder layers, of which no process keeps more than its part."""
    layers: torch.nn.Module = target.backbone.base.layers
    return layers


def together() -> None:
    """The runs ``sharded`` and ``parts``, copies that were killed and went on, and ``divided``."""
    parts = [*SHARED, "trainer.strategy.drafter=sharded"]
    sys.stdout.write("\n".join(trained(Path("sharded"), *SHARED)))
    sys.stdout.write(f"\nlayers are seen: {seen()}\n")
    again("sharded", "resumed", *SHARED)
    trained(Path("parts"), *parts)
    again("parts", "resumed-parts", *parts)
    trained(Path("divided"), *SHARED, "trainer.strategy.tensor_parallel_size=2")


if __name__ == "__main__":
    sys.exit(together())
