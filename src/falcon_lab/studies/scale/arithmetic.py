"""What training a drafter would take, by arithmetic alone: bytes, devices, hours.

A pass of the target over n tokens costs two operations for every weight and token, and attention
costs 4·n·(heads·head size) for every key. Decoding reads all weights for a token of each sequence
that is decoded together, and so is bound by the memory's bandwidth until these are many. A
trained weight costs six operations a token: two forward, four backward.

Shapes: T tokens of a sequence, H hidden, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

HOUR = 3600.0
FORWARD, BACKWARD = 2, 4
"""Operations of a weight and token."""
WEIGHT, ADAM = 4, 8
"""Bytes of a trained weight or its gradient, and of what AdamW remembers of it."""
GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind.

    Attributes:
        name: of the kind.
        devices: how many.
        operations: of one, a second: its peak in the precision of the target.
        bandwidth: bytes a second of one's memory.
        memory: bytes of one.
        source: where these figures are from.
    """

    name: str
    devices: int
    operations: float
    bandwidth: float
    memory: float
    source: str


PRESETS = {
    "a100": Hardware(
        "a100", 1, 312e12, 2.039e12, 80e9, "NVIDIA A100 80GB SXM data sheet, bfloat16, dense"
    ),
    "h100": Hardware(
        "h100", 1, 989e12, 3.35e12, 80e9, "NVIDIA H100 SXM data sheet, bfloat16, dense"
    ),
    "h200": Hardware(
        "h200", 1, 989e12, 4.8e12, 141e9, "NVIDIA H200 SXM data sheet, bfloat16, dense"
    ),
}
"""Devices by name. NVIDIA's sheets give operations with sparsity, twice as many."""


@dataclass(frozen=True)
class Assumed:
    """What a plan takes for granted.

    Attributes:
        utilisation: share of the peak that forward and backward passes reach.
        reach: share of the bandwidth that decoding reaches.
        usable: share of a device's memory that weights may take.
        sequences: that a replica of the target decodes together.
    """

    utilisation: float = 0.4
    reach: float = 0.6
    usable: float = 0.8
    sequences: int = 64


@dataclass(frozen=True)
class TargetCost:
    """The target, counted.

    Attributes:
        parameters: its numbers.
        bytes: of them, in its precision.
        precision: its name.
        largest_layer: bytes of the largest decoder layer, or of the LM head.
        matrices: entries of what every token is multiplied by, the LM head included.
        head: entries of the LM head.
        attended: operations of attention for a token and key, all layers that see it: of T tokens.
        cache: bytes of keys and values of a sequence of T/2 tokens, the mean while one is written.
        moved: bytes of the weights that a pass reads.
    """

    parameters: int
    bytes: int
    precision: str
    largest_layer: int
    matrices: int
    head: int
    attended: float
    cache: float
    moved: int


@dataclass(frozen=True)
class DrafterCost:
    """The drafter, counted.

    Attributes:
        name: of its component.
        parameters: that are trained.
        bytes: of a saved one.
        matrices: entries of what a position is multiplied by, of the trained ones.
        rows: predictions of a position.
        head: entries of the LM head over its draft vocabulary.
        own_head: whether it is a trained one, which ``matrices`` has.
        passes: of a training step, unrolled and repeated.
        glances: passes of these without gradient before them.
    """

    name: str
    parameters: int
    bytes: int
    matrices: int
    rows: float
    head: int
    own_head: bool
    passes: int
    glances: int


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        tokens: of the data.
        length: T.
        epochs: times that the drafter sees them.
        written: share of them that the target writes itself.
        batch: sequences of a training step and device.
        position_bytes: of a position in the feature store.
        store_bytes: of the whole store, by its own prediction.
        batch_bytes: of a batch's features and tapped states in memory.
        logits_bytes: that logits may take in a training step.
    """

    tokens: int
    length: int
    epochs: float
    written: float
    batch: int
    position_bytes: float
    store_bytes: int
    batch_bytes: int
    logits_bytes: int


@dataclass(frozen=True)
class Figure:
    """A result.

    Attributes:
        part: what it is about.
        what: names it.
        value: the number.
        unit: ``bytes``, ``devices``, ``hours`` or ``tokens/s``.
        how: it came about.
    """

    part: str
    what: str
    value: float
    unit: str
    how: str


# --- a token's cost -------------------------------------------------------------------------------


def read_operations(target: TargetCost) -> float:
    """Return the operations of a target's forward pass a token, without its LM head."""
    return FORWARD * (target.matrices - target.head) + target.attended


def extraction_operations(target: TargetCost) -> float:
    """Return those of a store a token: the LM head names the likeliest token beside the feature."""
    return read_operations(target) + FORWARD * target.head


def drafter_operations(drafter: DrafterCost) -> float:
    """Return the operations of a training step a token, without the target's forward pass.

    The teacher's logits are computed once; the drafter's by the target's head are multiplied
    forward, and backward to the drafter alone, since that head is frozen.
    """
    student: float = (FORWARD + BACKWARD) * drafter.matrices
    glance: float = FORWARD * drafter.matrices
    if not drafter.own_head:
        student += 2 * FORWARD * drafter.rows * drafter.head
        glance += FORWARD * drafter.rows * drafter.head
    return drafter.passes * student + drafter.glances * glance + FORWARD * drafter.head


def replicas(target: TargetCost, hardware: Hardware, assumed: Assumed) -> tuple[int, int]:
    """Return how many replicas of the target there are, and the devices of each.

    Where all devices together have no room for the weights they are one replica.
    """
    each = weight_devices(target, hardware, assumed)
    return (hardware.devices // each, each) if each <= hardware.devices else (1, hardware.devices)


def weight_devices(target: TargetCost, hardware: Hardware, assumed: Assumed) -> int:
    """Return the fewest devices that have room for the target's weights."""
    return max(1, math.ceil(target.bytes / (assumed.usable * hardware.memory)))


def decoding_rate(target: TargetCost, hardware: Hardware, assumed: Assumed) -> float:
    """Return the tokens a second of plain decoding on all devices."""
    count, each = replicas(target, hardware, assumed)
    sequences = assumed.sequences
    moved = target.moved + sequences * target.cache
    reading = moved / (each * hardware.bandwidth * assumed.reach)
    work = sequences * (FORWARD * target.matrices + target.attended / 2)
    computing = work / (each * hardware.operations * assumed.utilisation)
    return count * sequences / max(reading, computing)


def rate(operations: float, hardware: Hardware, assumed: Assumed) -> float:
    """Return the tokens a second on all devices of what costs so many operations a token."""
    return hardware.devices * hardware.operations * assumed.utilisation / operations


# --- the figures ----------------------------------------------------------------------------------


def figures(
    target: TargetCost,
    drafter: DrafterCost | None,
    work: Work,
    hardware: Hardware,
    assumed: Assumed,
) -> list[Figure]:
    """Return every figure of a plan, in the order in which they are shown.

    Args:
        target: the teacher.
        drafter: None where it has nothing to train.
        work: the data and the training.
        hardware: where.
        assumed: what is taken for granted.
    """
    found = [
        *_target_figures(target, hardware, assumed),
        *_store_figures(work),
        *_target_hours(target, work, hardware, assumed),
    ]
    if drafter is not None:
        found += _training_figures(target, drafter, work, hardware, assumed)
    return [*found, *_memory(target, drafter, work, hardware)]


def _target_figures(target: TargetCost, hardware: Hardware, assumed: Assumed) -> list[Figure]:
    numbers = f"{target.parameters:,} numbers"
    each = weight_devices(target, hardware, assumed)
    room = f"{assumed.usable:.0%} of {hardware.memory / GB:g} GB a device"
    others = (("float32", 4), ("bfloat16", 2), ("float8", 1))
    return [
        Figure("target", "weights", target.bytes, "bytes", f"{numbers} in {target.precision}"),
        *(
            Figure("target", f"weights in {name}", size * target.parameters, "bytes", numbers)
            for name, size in others
            if name != target.precision
        ),
        Figure("target", "devices for the weights", each, "devices", f"weights over {room}"),
    ]


def _store_figures(work: Work) -> list[Figure]:
    return [
        Figure(
            "features",
            "a token",
            work.position_bytes,
            "bytes",
            "features, tapped states and the likeliest token, as the store keeps them",
        ),
        Figure("features", "whole store", work.store_bytes, "bytes", f"{work.tokens:,} tokens"),
    ]


def _target_hours(
    target: TargetCost, work: Work, hardware: Hardware, assumed: Assumed
) -> list[Figure]:
    written = work.written * work.tokens
    count, each = replicas(target, hardware, assumed)
    decoding = decoding_rate(target, hardware, assumed)
    extraction = rate(extraction_operations(target), hardware, assumed)
    room = each >= weight_devices(target, hardware, assumed)
    where = f"{count} × {counted(each, 'device')}, {assumed.sequences} sequences each"
    where += "" if room else ", which have no room for the weights"
    operations = f"{extraction_operations(target) / GB:,.4g} G operations a token"
    return [
        Figure("regeneration", "speed", decoding, "tokens/s", where),
        Figure(
            "regeneration",
            "time",
            written / decoding / HOUR,
            "hours",
            f"{written:,.0f} tokens, {work.written:.0%} of the data",
        ),
        Figure("extraction", "speed", extraction, "tokens/s", operations),
        Figure(
            "extraction",
            "time",
            work.tokens / extraction / HOUR,
            "hours",
            "one forward pass over the data",
        ),
    ]


def _training_figures(
    target: TargetCost,
    drafter: DrafterCost,
    work: Work,
    hardware: Hardware,
    assumed: Assumed,
) -> list[Figure]:
    seen, own = work.tokens * work.epochs, drafter_operations(drafter)
    on_line = own + read_operations(target)
    glances = f" and {counted(drafter.glances, 'glance')}" if drafter.glances else ""
    passes = f"{counted(drafter.passes, 'pass', 'passes')}{glances}"
    figures_of = []
    variants: tuple[tuple[str, float, str], ...] = (
        ("from a store", own, passes),
        ("target on line", on_line, "and the target's forward pass in every step"),
    )
    for what, operations, note in variants:
        speed = rate(operations, hardware, assumed)
        how = f"{operations / GB:,.4g} G operations a token: {note}"
        figures_of += [
            Figure("training", f"speed {what}", speed, "tokens/s", how),
            Figure(
                "training",
                f"time {what}",
                seen / speed / HOUR,
                "hours",
                f"{seen:,.0f} tokens ({counted(work.epochs, 'epoch')})",
            ),
        ]
    trained = f"{drafter.parameters:,} trained numbers of {drafter.name}, as they are saved"
    saved = Figure("drafter", "weights", drafter.bytes, "bytes", trained)
    return [saved, *figures_of]


def _memory(
    target: TargetCost, drafter: DrafterCost | None, work: Work, hardware: Hardware
) -> list[Figure]:
    """Return the memory of one device in training, part by part and together."""
    sharded = math.ceil(target.bytes / hardware.devices)
    gathered = target.largest_layer if hardware.devices > 1 else 0
    trained = 0 if drafter is None else (2 * WEIGHT + ADAM) * drafter.parameters
    parts = {
        "target": (sharded, f"weights, sharded over {counted(hardware.devices, 'device')}"),
        "layer at work": (gathered, "gathered from all devices"),
        "drafter": (trained, "weights, gradients and AdamW's state in float32, on every device"),
        "batch": (work.batch_bytes, f"features and taps of {work.batch} × {work.length} tokens"),
        "logits": (work.logits_bytes, "distillation.logits_mib"),
    }
    total = sum(size for size, _ in parts.values())
    fits = "fits" if total <= hardware.memory else "does not fit"
    room = f"{fits} into {hardware.memory / GB:g} GB; activations of the passes not counted"
    return [
        *(Figure("a device", what, size, "bytes", how) for what, (size, how) in parts.items()),
        Figure("a device", "together", total, "bytes", room),
    ]


def sentences(hardware: Hardware, assumed: Assumed) -> list[str]:
    """Return what a plan takes for granted, in words."""
    return [
        f"Hardware: {hardware.devices} × {hardware.name}, each {hardware.operations:.4g} "
        f"operations/s, {hardware.bandwidth:.4g} bytes/s, {hardware.memory / GB:g} GB "
        f"({hardware.source}).",
        f"Assumed: passes reach {assumed.utilisation:.0%} of these operations, decoding "
        f"{assumed.reach:.0%} of the bandwidth; work divides evenly over devices, and what they "
        "send each other hides behind it.",
        f"Decoding: {assumed.sequences} sequences together on a replica, half written on average; "
        f"weights may take {assumed.usable:.0%} of a device's memory.",
        "Attention is counted of the target, over whole sequences without regard to its mask, and "
        "not of the drafter; passes of a drafter through the target's own layers are not counted, "
        "nor evaluation, validation or reading from the disk.",
    ]


def as_dict(found: list[Figure]) -> dict[str, dict[str, dict[str, float | str]]]:
    """Return figures by part and name, for programs."""
    parts: dict[str, dict[str, dict[str, float | str]]] = {}
    for each in found:
        entry: dict[str, float | str] = {"value": each.value, "unit": each.unit, "how": each.how}
        parts.setdefault(each.part, {})[each.what] = entry
    return parts


def value_of(found: list[Figure], part: str, what: str) -> float:
    """Return the value of one figure."""
    return next(each.value for each in found if (each.part, each.what) == (part, what))


def counted(number: float, one: str, many: str = "") -> str:
    """Return a number with what it counts."""
    return f"{number:g} {one if number == 1 else many or one + 's'}"


UNITS: Mapping[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
    "hours": ((24 * 365, "years"), (24, "days"), (1, "h"), (1 / 60, "min"), (1 / 3600, "s")),
}
"""Unit -> sizes in which it is read, largest first."""


def readable(value: float, unit: str) -> str:
    """Write a figure as people read it."""
    if unit == "devices":
        return f"{value:,.0f}"
    if unit == "tokens/s":
        return f"{value:,.4g} tokens/s" if value < 1e4 else f"{value:,.0f} tokens/s"
    sizes = UNITS[unit]
    size, name = next((each for each in sizes if value >= each[0]), sizes[-1])
    return f"{value / size:.3g} {name}" if value / size < 1000 else f"{value / size:,.0f} {name}"
