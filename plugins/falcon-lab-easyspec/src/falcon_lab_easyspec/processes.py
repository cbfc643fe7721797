"""Groups of layers on several processes: each computes some attentions, and all get all of them.

    torchrun --nproc-per-node 2 -m falcon_lab_easyspec processes TARGET "A prompt" --size 4

Every process has the whole model and does the same, but for the attentions of groups: process r
computes those of the layers r, r + N, … of a group, keeps their keys and values alone, and an
all_gather gives every process what each attention adds. Networks are replicated.

Shapes: B batch, n tokens, H hidden, R attentions of a group that one process computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed

from falcon_lab.errors import FalconLabError, first_line
from falcon_lab.interfaces import BuildContext, LayerPlan
from falcon_lab.model.target import Target
from falcon_lab.testing import engine, write
from falcon_lab.timing import Stopwatch
from falcon_lab_easyspec import EasySpecConfig
from falcon_lab_easyspec.drafter import SideBySideDrafter

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets."""

SECONDS = 60.0
"""How long a process waits for the others."""


class Processes:
    """The processes of a group, one of which this is (``SideBySide``).

    Attributes:
        rank: this one's number.
        count: of processes.
    """

    def __init__(self) -> None:
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def __deepcopy__(self, memo: object) -> Processes:
        return self

    def check(self, plan: LayerPlan, layers: int) -> None:
        """See that every process computes an attention of every pass.

        Raises:
            FalconLabError: one of them would not know how long its cache is.
        """
        alone = layers - sum(map(len, plan.groups))
        if not alone and max(map(len, plan.groups), default=0) < self.count:
            raise FalconLabError(
                f"process {self.count - 1} would compute no attention: every layer is in a group, "
                f"and none has {self.count} layers; leave a layer alone, or start fewer processes"
            )

    def __call__(self, attentions: Sequence[Callable[[], Tensor]], hidden: Tensor) -> list[Tensor]:
        """Compute this process's attentions, and get what all of them add.

        Raises:
            FalconLabError: another process is gone.
        """
        rounds = -(-len(attentions) // self.count)
        own = hidden.new_zeros(rounds, *hidden.shape)
        for place, attention in enumerate(attentions[self.rank :: self.count]):
            own[place] = attention()
        every = [torch.empty_like(own) for _ in range(self.count)]
        with waiting("another process of the group is gone"):
            # As bytes: not every backend knows every dtype.
            distributed.all_gather([as_bytes(one) for one in every], as_bytes(own))
        return [every[n % self.count][n // self.count] for n in range(len(attentions))]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Do what waits for other processes.

    Raises:
        FalconLabError: they did not answer, which ``what`` says.
    """
    try:
        yield
    except RuntimeError as error:
        raise FalconLabError(
            f"{what} ({first_line(error)[:200]}); start all of them anew"
        ) from error


@contextmanager
def connected(
    device: torch.device, *, init: str = "env://", seconds: float = SECONDS
) -> Iterator[Processes]:
    """Meet the other processes: by NCCL on a GPU, by gloo on a CPU.

    Args:
        device: of this process's tensors.
        init: where they meet, as of ``torch.distributed.init_process_group``.
        seconds: that they are waited for, here and in every pass.

    Raises:
        FalconLabError: nobody has launched them, or one of them is missing.
    """
    missing = [name for name in LAUNCHED[: 4 if init == "env://" else 2] if name not in os.environ]
    if missing:
        raise FalconLabError(f"{missing[0]} is not set; start the processes by torchrun")
    rank, count = (int(os.environ[name]) for name in LAUNCHED[:2])
    backend = "nccl" if device.type == "cuda" else "gloo"
    with waiting(f"not all of {count} processes have come within {seconds:g} seconds"):
        distributed.init_process_group(
            backend,
            init_method=init,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=seconds),
        )
    try:
        yield Processes()
    finally:
        distributed.destroy_process_group()


def drafter_of(target: Target, config: EasySpecConfig, processes: Processes) -> SideBySideDrafter:
    """Return the drafter on a target whose attentions of groups these processes share.

    Raises:
        FalconLabError: groups and processes do not fit.
    """
    made = SideBySideDrafter(config, BuildContext(target), processes)
    processes.check(made.plan, target.config.num_hidden_layers)
    return made


def report(
    target: Target,
    prompt: str,
    config: EasySpecConfig,
    processes: Processes,
    *,
    depth: int,
    tokens: int,
) -> Iterator[str]:
    """Yield the text, and a line for each way to compute groups; all processes do the same.

    Args:
        target: on this process's device.
        prompt: what is continued.
        config: the groups.
        processes: all of them.
        depth: draft tokens of a round.
        tokens: new ones of the text.
    """
    read = target.tokenizer(prompt)["input_ids"]
    alone = SideBySideDrafter(config, BuildContext(target))
    across = drafter_of(target, config, processes)
    for name, drafter in (("1 process", alone), (f"{processes.count} processes", across)):
        made = engine(target, drafter, tree={"name": "chain", "depth": depth})
        with Stopwatch(target.device) as watch:
            found = write(made, read, tokens, ends=sorted(target.eos_ids))
        if drafter is alone:
            yield target.tokenizer.decode(found.tokens)
        new, rounds = len(found.tokens), len(found.rounds)
        yield f"{name}: {new} tokens in {rounds} rounds, {new / watch.wall:.1f} a second"
