"""Measure how near a pass of the target is to the least time that this machine needs for it.

A pass must read every weight once and every key and value that it attends to, and must do its
multiplications (Williams et al., *Roofline*, CACM 52(4), 2009). The floor is the larger of bytes
over the measured copy rate and operations over the measured rate of a matrix product.

Shapes: n new tokens of a pass, S positions in the KV cache before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from falcon_lab.measure.records import Record
from falcon_lab.model.families import SLIDING, LayerSizes
from falcon_lab.timing import fastest

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

MIB = 2**20

COPIED = {"cpu": (MIB, 512 * MIB), "cuda": (256 * MIB, 1024 * MIB)}
"""Device -> least and most bytes that a copy reads and writes. On a GPU less would time the launch
of the kernel."""

SIDE = {"cpu": 1024, "cuda": 8192}
"""Device -> rows and columns of the matrices."""


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        bytes_per_second: of a copy; a byte that is read and written counts twice.
        copied_bytes: what one copy read and wrote.
        operations_per_second: of a matrix product; a multiplication and an addition are two.
        matrix_side: rows and columns of its matrices.
        dtype: of the matrices.
    """

    bytes_per_second: float
    copied_bytes: int
    operations_per_second: float
    matrix_side: int
    dtype: str


def measure_machine(
    device: torch.device, dtype: torch.dtype, working_set: int, *, seconds: float = 0.5
) -> Machine:
    """Measure with the threads that are set, ``seconds`` for each figure.

    Args:
        device: where.
        dtype: of the matrices.
        working_set: bytes that the work in question moves. The copy is as large, so that processor
            caches serve it alike: a model that fits into one is not bound by the memory behind it.
        seconds: time for each of the two.
    """
    least, most = COPIED.get(device.type, COPIED["cuda"])
    copied = min(max(working_set, least), most) // 8 * 8
    source = torch.ones(copied // 8, device=device)  # 4 bytes each, read here and written there
    goal = torch.empty_like(source)
    copy = fastest(lambda: goal.copy_(source), device, seconds=seconds)
    side = SIDE.get(device.type, SIDE["cuda"])
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    product = fastest(lambda: torch.mm(left, right, out=out), device, seconds=seconds)
    return Machine(copied / copy, copied, 2 * side**3 / product, side, str(dtype))


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys by which configurations show that a token uses some of the weights alone."""


@dataclass(frozen=True)
class PassCost:
    """What a pass of a target costs.

    Attributes:
        weight_bytes: of all weights but the embedding table, of which a pass reads its tokens'
            entries alone.
        weights: entries of the matrices that every token is multiplied with.
        cache_bytes: of one position of one layer's keys and values.
        attention: query heads times head size.
        windows: positions that each layer attends to; None: all.
    """

    weight_bytes: int
    weights: int
    cache_bytes: int
    attention: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, target: Target, active: int | None = None) -> Self | None:
        """Count those of a target; None for a mixture of experts, where it depends on the text.

        Args:
            target: the model.
            active: entries that a token is multiplied with, where that is known of a mixture.
        """
        config, backbone = target.config, target.backbone
        mixture = any((getattr(config, key, None) or 0) > 1 for key in EXPERTS)
        if mixture and active is None:
            return None
        tables = {
            id(p)
            for m in backbone.modules()
            if isinstance(m, nn.Embedding)
            for p in [*m.parameters()]
        }
        read = {id(p): p for p in backbone.parameters() if id(p) not in tables}
        read |= {id(p): p for p in target.model.get_output_embeddings().parameters()}
        sizes = LayerSizes.of(config)
        layers: int = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or [backbone.kinds[0]] * layers
        return cls(
            weight_bytes=sum(p.numel() * p.element_size() for p in read.values()),
            weights=active or sum(p.numel() for p in read.values() if p.dim() > 1),
            cache_bytes=2 * sizes.groups * sizes.head * target.dtype.itemsize,
            attention=sizes.heads * sizes.head,
            windows=tuple(backbone.window if kind == SLIDING else None for kind in kinds),
        )

    def bytes(self, new: int, context: int) -> int:
        """Count the bytes that a pass of n tokens must move after S, its own keys included."""
        positions = sum(self._seen(context)) + new * len(self.windows)
        return self.weight_bytes + self.cache_bytes * positions

    def operations(self, new: int, context: int) -> int:
        """Count multiplications and additions of a pass of n tokens after S tokens."""
        keys = sum(self._seen(context)) + new * len(self.windows)
        return 2 * new * self.weights + 4 * new * self.attention * keys

    def _seen(self, context: int) -> Iterator[int]:
        """Return the earlier positions that each layer attends to."""
        return (context if window is None else min(context, window) for window in self.windows)


@dataclass(frozen=True)
class Floor:
    """A method's target passes, and the least time for them; means over all passes.

    Attributes:
        passes: how many there were.
        rows: tokens that a pass reads.
        context: positions in the KV cache before it.
        bytes: that it must move.
        operations: that it must do.
        milliseconds: measured.
        memory_milliseconds: bytes over the measured copy rate.
        compute_milliseconds: operations over the measured rate of a matrix product.
        reached: the larger of the two, pass by pass, over the measured time: 1 is the floor.
    """

    passes: int
    rows: float
    context: float
    bytes: float
    operations: float
    milliseconds: float
    memory_milliseconds: float
    compute_milliseconds: float
    reached: float


def floor_of(records: Sequence[Record], cost: PassCost, machine: Machine) -> Floor | None:
    """The floor under a method's passes; None for one that cannot be looked into."""
    measured = sum(record.times.verify or 0.0 for record in records)
    passes = [shape for record in records for shape in _passes(record)]
    if not passes or not measured:
        return None
    count = len(passes)
    moved = [cost.bytes(new, context) for new, context in passes]
    done = [cost.operations(new, context) for new, context in passes]
    memory = [each / machine.bytes_per_second for each in moved]
    compute = [each / machine.operations_per_second for each in done]
    return Floor(
        passes=count,
        rows=sum(new for new, _ in passes) / count,
        context=sum(context for _, context in passes) / count,
        bytes=sum(moved) / count,
        operations=sum(done) / count,
        milliseconds=1000 * measured / count,
        memory_milliseconds=1000 * sum(memory) / count,
        compute_milliseconds=1000 * sum(compute) / count,
        reached=sum(map(max, memory, compute)) / measured,
    )


def _passes(record: Record) -> Iterator[tuple[int, int]]:
    """Yield tokens and context of every pass: the newest token is read with the draft tokens."""
    for turn in record.turns:
        context = turn.prompt_tokens
        for nodes, accepted in zip(turn.rounds.nodes, turn.rounds.accepted, strict=True):
            yield nodes + 1, context
            context += accepted + 1
