"""A model of what a drafting pass costs on several devices, from parts that are measured on one.

    python -m falcon_lab_easyspec costs TARGET --devices 2 --devices 8 --size 4 --gather 20

What it assumes is printed with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from falcon_lab.interfaces import LayerPlan
from falcon_lab.model.passes import NewPositions
from falcon_lab.model.target import Target
from falcon_lab.timing import fastest

ASSUMPTIONS = (
    "A model, no measurement. It assumes that every device is like the one that was timed and has "
    "all weights; that networks, and layers outside of groups, run on every device alike; that the "
    "attentions of a group take as long as the device that has the most of them; and that one "
    "gather a group takes the time given, and overlaps with nothing."
)


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a pass.

    Attributes:
        attention: of a layer, with the norm before it.
        network: of a layer, likewise.
        rest: of everything outside of layers: embedding, final norm, LM head.
        gather: of what a group's attentions add, from all devices to all.
    """

    attention: float
    network: float
    rest: float
    gather: float = 0.0


def pass_seconds(parts: Parts, side_by_side: Sequence[int], devices: int) -> float:
    """Return the seconds of a pass on so many devices.

    Args:
        parts: of one device.
        side_by_side: how many layers have their attentions side by side, group after group; 1 is
            a layer alone.
        devices: that share the attentions of a group.
    """
    seconds = parts.rest
    for count in side_by_side:
        turns = -(-count // devices)
        seconds += turns * parts.attention + count * parts.network
        if devices > 1 and count > 1:
            seconds += parts.gather
    return seconds


@torch.inference_mode()
def measured(target: Target, *, context: int, seconds: float = 1.0) -> Parts:
    """Time the parts of a pass over one token, behind so many tokens of context.

    They are what a pass is slower with attentions, or networks, than without them.

    Args:
        target: the model.
        context: tokens in the KV cache.
        seconds: time for each of four samples.
    """
    cache = target.new_cache(context + 1)
    layers = target.config.num_hidden_layers
    every = frozenset(range(layers))
    tokens = torch.arange(context, device=target.device) % target.vocab_size
    target.prefill(tokens, cache)
    where = NewPositions(torch.tensor([context], device=target.device), None, cache)

    def time(plan: LayerPlan) -> float:
        def run() -> None:
            cache.truncate(context)
            target.run_part(tokens[:1], where, plan)

        return fastest(run, target.device, seconds=seconds)

    whole = time(LayerPlan())
    no_attention, no_network = (
        time(LayerPlan(skip_attention=every)),
        time(LayerPlan(skip_mlp=every)),
    )
    states = target.embed(tokens[:1])
    head = fastest(lambda: target.head(states), target.device, seconds=seconds)
    attention = max(0.0, whole - no_attention) / layers
    network = max(0.0, whole - no_network) / layers
    return Parts(attention, network, max(0.0, whole - layers * (attention + network)) + head)


def table(parts: Parts, side_by_side: Sequence[int], devices: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table: seconds of a pass by the number of devices."""
    alone = [1] * sum(side_by_side)
    before = pass_seconds(parts, alone, 1)
    yield (
        f"attention {1e6 * parts.attention:.0f} µs and network {1e6 * parts.network:.0f} µs a "
        f"layer, rest {1e6 * parts.rest:.0f} µs (measured); gather {1e6 * parts.gather:.0f} µs "
        "(given)"
    )
    yield f"one layer after the other, on 1 device: {1e3 * before:.2f} ms"
    yield "devices  ms of a pass  times as fast"
    for count in devices:
        found = pass_seconds(parts, side_by_side, count)
        yield f"{count:7}  {1e3 * found:12.2f}  {before / found:13.2f}"
