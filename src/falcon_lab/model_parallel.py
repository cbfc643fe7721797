"""A frozen target that the processes of a training share, by FSDP2 and tensor parallelism.

Lightning's ``ModelParallelStrategy`` starts the processes and arranges them in a grid: along one
dimension they have different batches, along the other a part of each layer. The target's decoder
layers are sharded over both; its tables and its LM head, of which rows are copied and losses made,
are whole everywhere. The drafter is trained, and small: it is whole everywhere too, and its
gradients are averaged before every step of the optimiser; or it is sharded like the target, and
gathered for a step. Checkpoints are those of a training in one process either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from falcon_lab.config.trainer import HELD
from falcon_lab.errors import FalconLabError
from falcon_lab.model.families import LayerSizes
from falcon_lab.model.memory import gib
from falcon_lab.model.partial import layers_of
from falcon_lab.model.target import Target

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""Dimensions of Lightning's grid of processes."""
COLUMNS, ROWS = "colwise", "rowwise"
EVERYWHERE = ("replicated_with_grad_allreduce", "replicate")
"""What transformers calls the ways in which the modules of a layer are divided."""
STATES = 4
"""Tensors of a trained weight: itself, its gradient, and the two of AdamW."""


class SharedTarget(ModelParallelStrategy):
    """Lightning's strategy, with the checkpoints of one process.

    What Lightning knows as the module is the drafter alone, whole in every process.

    Attributes:
        shards_drafter: whether the processes divide the drafter and its optimiser, too.

    Args:
        tensor_parallel_size: processes that divide each layer among them.
        data_parallel_size: processes that have batches of their own and divide the layers' weights;
            None: all, over ``tensor_parallel_size``.
        drafter: ``replicated`` or ``sharded``.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        drafter: str = HELD[0],
    ) -> None:
        super().__init__(
            data_parallel_size or "auto", tensor_parallel_size, save_distributed_checkpoint=False
        )
        self._tensor, self._data = tensor_parallel_size, data_parallel_size
        self.shards_drafter = drafter != HELD[0]

    # Lightning's own take weights for sharded, and name the optimiser's in their own way.
    save_checkpoint = ParallelStrategy.save_checkpoint
    load_checkpoint = ParallelStrategy.load_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, whole in every process."""
        state: dict[str, Any] = whole(ParallelStrategy.lightning_module_state_dict(self))
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, of which each process keeps its part."""
        assert self.lightning_module is not None
        places = self.lightning_module.state_dict()
        state = {
            name: divided(weights, places.get(name))
            for name, weights in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what the optimiser remembers, whole in every process."""
        state: dict[str, Any] = whole(ParallelStrategy.optimizer_state(self, optimizer))
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what the optimisers remembered, of which each process keeps its part."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            remembered = {
                number: {key: divided(value, weights[number]) for key, value in each.items()}
                for number, each in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": remembered})

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return that checkpoints are read before the processes' work is arranged."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return that Lightning restores the optimiser."""
        return True

    def setup_environment(self) -> None:
        """Start, and arrange the processes.

        Raises:
            FalconLabError: their number is not that of the grid.
        """
        processes = self.num_nodes * self.num_processes
        data = processes // self._tensor if self._data is None else self._data
        if data * self._tensor != processes:
            raise FalconLabError(
                f"trainer.strategy: {data} (data_parallel_size) × {self._tensor} "
                f"(tensor_parallel_size) are not the {processes} processes that there are; change "
                "them, trainer.devices or trainer.num_nodes"
            )
        self._data_parallel_size = data
        super().setup_environment()


def whole(tree: Any) -> Any:
    """Return a nested mapping with every divided tensor gathered; all processes must ask for it."""
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


def divided(value: Any, like: Any) -> Any:
    """Return a tensor that is whole everywhere as another one of its shape is divided, if it is."""
    if not isinstance(like, DTensor) or getattr(value, "shape", None) != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def shard_drafter(module: nn.Module, steps: Sequence[str], grid: DeviceMesh) -> None:
    """Divide what a module trains over the processes that have batches of their own.

    It is gathered when one of its steps begins, and let go when the gradient has been made of it,
    of which every process gets its part of the mean.

    Args:
        module: has the drafter and calls it.
        steps: names of the methods that do.
        grid: of ``SharedTarget``.
    """
    fully_shard(module, mesh=grid[DATA], reshard_after_forward=False)
    for name in steps:
        register_fsdp_forward_method(module, name)


def gather_drafter(module: nn.Module, drafter: nn.Module) -> None:
    """Make a drafter whole again in every process, for good.

    Args:
        module: as ``shard_drafter`` had it.
        drafter: a part of it.
    """
    cast(FSDPModule, module).reshard()
    made: dict[int, nn.Parameter] = {}
    for part in drafter.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not isinstance(weight, DTensor):
                continue
            if id(weight) not in made:
                made[id(weight)] = nn.Parameter(weight.full_tensor(), weight.requires_grad)
            part.register_parameter(name, made[id(weight)])


@dataclass(frozen=True)
class Memory:
    """What one process holds of a shared target.

    Attributes:
        whole: bytes of the target.
        held: of these, in every process between two passes.
        gathered: of the layer that is at work, beside its own part.
        layers: how many are shared.
        data: processes along that dimension of the grid.
        tensor: along the other.
    """

    whole: int
    held: int
    gathered: int
    layers: int
    data: int
    tensor: int

    def sentence(self, drafter: nn.Module) -> str:
        """Return what every process holds, in words."""
        trained = [weight for weight in drafter.parameters() if weight.requires_grad]
        state = STATES * _bytes(trained)
        return (
            f"model_parallel: {self.layers} layers of the target shared by {self.data} × "
            f"{self.tensor} processes (data × tensor); each holds {gib(self.held)} of its "
            f"{gib(self.whole)}, {gib(self.gathered)} of a layer at work, and {gib(state)} of the "
            "drafter and its optimiser, besides activations"
        )


def share_target(target: Target, grid: DeviceMesh) -> Memory:
    """Divide the target's layers among the processes of a grid, for good.

    Args:
        target: the same in every process; whole in none afterwards.
        grid: of ``SharedTarget``.

    Raises:
        FalconLabError: its layers cannot be divided so.
    """
    base = target.backbone.base
    layers = layers_of(base)[1]
    size = _bytes(target.model.parameters())
    if grid[TENSOR].size() > 1:
        parallelize_module(base, grid[TENSOR], tensor_plan(target, grid[TENSOR].size()))
    parts = max(_bytes(layer.parameters()) for layer in layers)
    if grid[DATA].size() > 1:
        # The layers alone: of a model that is sharded itself, and so of another class, transformers
        # does not know what it can record.
        for layer in layers:
            fully_shard(layer, mesh=grid[DATA], reshard_after_forward=True)
    held = max(_bytes(layer.parameters()) for layer in layers)
    return Memory(
        size,
        _bytes(target.model.parameters()),
        parts - held,
        len(layers),
        grid[DATA].size(),
        grid[TENSOR].size(),
    )


def _bytes(weights: Iterable[Tensor]) -> int:
    """Return the bytes of what this process has of some weights."""
    return sum((w.to_local() if isinstance(w, DTensor) else w).nbytes for w in weights)


def tensor_plan(target: Target, parts: int) -> dict[str, ParallelStyle]:
    """Return how a model's own plan divides every layer: modules' names -> torch's style.

    Raises:
        FalconLabError: it has no plan, one that is not known here, or heads that so many processes
            cannot share.
    """
    named: dict[str, str] = getattr(target.config, "base_model_tp_plan", None) or {}
    strange = sorted(set(named.values()) - {COLUMNS, ROWS, *EVERYWHERE})
    kind = target.config.model_type
    if not named or strange:
        what = f"a plan with {', '.join(strange)}" if strange else "no plan"
        raise FalconLabError(
            f"trainer.strategy.tensor_parallel_size is {parts}, and transformers has {what} for "
            f"{kind}; set it to 1, which shards whole layers"
        )
    sizes = LayerSizes.of(target.config)
    for what, count in (
        ("query heads", sizes.heads),
        ("heads of keys and values", sizes.groups),
        ("channels of a feed-forward layer", sizes.inner),
    ):
        if count % parts:
            raise FalconLabError(
                f"trainer.strategy.tensor_parallel_size is {parts}, which does not divide the "
                f"{count} {what} of {target.name}"
            )
    styles = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}
    return {name: styles[way]() for name, way in named.items() if way in styles}


def average_gradients(weights: Iterable[nn.Parameter]) -> None:
    """Average gradients over all processes; a weight that none of them reached stays without one.

    Args:
        weights: the trained ones, in the same order everywhere.
    """
    weights = list(weights)
    world = torch.distributed.get_world_size()
    if not weights or world == 1:
        return
    reached = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
    reached = reached.to(weights[0].device)
    torch.distributed.all_reduce(reached)
    for weight, some in zip(weights, reached.tolist(), strict=True):
        if some:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.distributed.all_reduce(gradient)
            weight.grad = gradient / world
