"""Choose the attention of a target: configured by name, or measured layer for layer.

Every choice is announced. A name that this machine cannot run is an error; a model whose layers
leave nothing to merge keeps the attention that it was loaded with, and the reason is announced.

Shapes: B batch, A query heads, G key/value heads, N nodes of a tree, P tokens of its context, D
head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from falcon_lab.config.schema import dtype_name
from falcon_lab.errors import FalconLabError
from falcon_lab.model.attention.backend import Backend, Kernel, fold, widened
from falcon_lab.model.attention.kernels import KERNELS, usable_kernels
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.registration import register
from falcon_lab.model.families import FULL, LayerSizes
from falcon_lab.timing import fastest, in_turns

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

SDPA = "sdpa"
"""PyTorch's attention with the whole mask, without one for a single token."""

TURNS = 3
"""Times that the backends follow each other, so that a busy moment hits all of them."""


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        heads: A.
        groups: G.
        head_size: D.
    """

    heads: int
    groups: int
    head_size: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, target: Target) -> Self:
        """Return the attention shape of a target."""
        sizes = LayerSizes.of(target.config)
        return cls(sizes.heads, sizes.groups, sizes.head, target.device, target.dtype)


@dataclass(frozen=True)
class Timing:
    """One backend's time.

    Attributes:
        backend: its name.
        context: P.
        rows: N.
        seconds: of one call, the best of many.
    """

    backend: str
    context: int
    rows: int
    seconds: float


@torch.inference_mode()
def time_attention(
    backends: Mapping[str, Backend],
    shape: AttentionShape,
    contexts: Sequence[int],
    rows: Sequence[int],
    *,
    seconds: float,
) -> Iterator[Timing]:
    """Time sdpa and the backends, in turns, with batches of one.

    Args:
        backends: by name, beside ``sdpa``.
        shape: of a layer.
        contexts: P, one after the other.
        rows: N for each of them.
        seconds: for each backend, context and N.
    """
    for context in contexts:
        for count in rows:
            best: dict[str, float] = {}
            attention = calls(backends, shape, context, count)
            for _, name in in_turns(list(attention), TURNS):
                found = fastest(attention[name], shape.device, seconds=seconds / TURNS)
                best[name] = min(best.get(name, found), found)
            yield from (Timing(name, context, count, taken) for name, taken in best.items())


def calls(
    backends: Mapping[str, Backend], shape: AttentionShape, context: int, nodes: int
) -> dict[str, Callable[[], Tensor]]:
    """Return the same attention through sdpa and every backend, set up but for what is timed."""
    drawn = torch.Generator().manual_seed(0)

    def states(heads: int, count: int) -> Tensor:
        made = torch.randn(1, heads, count, shape.head_size, generator=drawn)
        return made.to(shape.device, shape.dtype)

    query = states(shape.heads, nodes)
    keys, values = (states(shape.groups, context + nodes) for _ in range(2))
    scale = shape.head_size**-0.5
    # Two chains side by side: what decides the time of a tree is its number of nodes.
    node = torch.arange(nodes, device=shape.device)
    tree = ((node[:, None] >= node) & ((node[:, None] - node) % 2 == 0))[None, None]
    whole = widened(tree, context + nodes).repeat(1, 1, shape.heads // shape.groups, 1)
    sdpa = partial(
        F.scaled_dot_product_attention,
        *(fold(query, shape.groups), keys, values),
        attn_mask=whole if nodes > 1 else None,
        scale=scale,
    )
    mask = tree if nodes > 1 else None
    ours = {n: partial(b, query, keys, values, mask, scale=scale) for n, b in backends.items()}
    return {SDPA: sdpa, **ours}


AUTO = "auto"
MERGING = (AUTO, *(kernel.name for kernel in KERNELS))
"""Values of ``target.attention`` that are decided here."""

CONTEXTS = (256, 1024, 4096)
NODES = 32
SECONDS = 0.01
MARGIN = 0.95
"""A backend must need less than this share of sdpa's time to be called faster."""


def loading_attention(asked: str, settings: Any, architecture: Any) -> tuple[str, str | None]:
    """The attention that Hugging Face loads a model with, and why it cannot be more than that.

    Args:
        asked: ``target.attention``.
        settings: the model's (text) configuration.
        architecture: its class in transformers.
    """
    if asked not in MERGING:
        return asked, None
    if getattr(settings, "attn_logit_softcapping", None):
        return "eager", "it caps its attention scores"
    if architecture is not None and not architecture._supports_sdpa:
        return "eager", "its attention is no plain softmax over its keys"
    return SDPA, None


def use_backend(
    target: Target,
    asked: str,
    announce: Callable[[str], None],
    *,
    reason: str | None = None,
    kernels: Sequence[Kernel] = KERNELS,
) -> None:
    """Give a target, on its device, the backend that ``target.attention`` asks for.

    Args:
        target: loaded with what ``loading_attention`` says.
        asked: ``auto`` or a kernel's name.
        announce: is called with what was chosen and why, a line each.
        reason: why the model can take none, where that is known.
        kernels: to choose from.

    Raises:
        FalconLabError: for a kernel that cannot run here.
    """
    shape = AttentionShape.of(target)
    if asked != AUTO:
        usable = [_insisted(asked, shape, kernels)]
    else:
        usable = usable_kernels(shape.device, shape.dtype, shape.head_size, kernels)
    if reason := reason or unfit(target):
        announce(f"target {target.name}: attention {target.backbone.implementation}: {reason}")
        return
    backend = Merged(usable[0]) if asked != AUTO else _fastest(target, shape, usable, announce)
    if backend is not None:
        _set(target, backend, announce)


def unfit(target: Target) -> str | None:
    """Return why a target's layers leave nothing to merge, or None."""
    if FULL not in target.backbone.kinds:
        return "all its layers see a sliding window, which is written into a mask"
    values = getattr(target.config, "v_head_dim", None)
    if values is not None and values != LayerSizes.of(target.config).head:
        return "its values are of another size than its keys"
    return None


def _insisted(asked: str, shape: AttentionShape, kernels: Sequence[Kernel]) -> Kernel:
    kernel = next(kernel for kernel in kernels if kernel.name == asked)
    if problem := kernel.refuses(shape.device, shape.dtype, shape.head_size):
        raise FalconLabError(
            f"target.attention is {asked}, which cannot be used here: {problem}; set it to auto "
            "or sdpa"
        )
    return kernel


def _fastest(
    target: Target,
    shape: AttentionShape,
    kernels: Sequence[Kernel],
    announce: Callable[[str], None],
) -> Merged | None:
    """Measure and announce the times; return the backend that is faster than sdpa, if one is."""
    longest = max(1, target.max_positions - NODES)
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    merged = {kernel.name: Merged(kernel) for kernel in kernels}
    timings = []
    if merged:
        timings = list(time_attention(merged, shape, contexts, [NODES], seconds=SECONDS))
    if not timings:
        announce(f"target {target.name}: attention sdpa: no other supports {_words(shape)}")
        return None
    picked = pick(timings)
    times = "; ".join(_times(name, timings) for name in (SDPA, *merged))
    measured = f"(a tree of {NODES} nodes, ms a layer after {_listed(contexts)} tokens: {times})"
    if picked is None:
        announce(f"target {target.name}: attention sdpa {measured}")
        return None
    name, least = picked
    announce(f"target {target.name}: attention {name} from {least} tokens of context on {measured}")
    return Merged(merged[name].kernel, least)


def pick(timings: Sequence[Timing]) -> tuple[str, int] | None:
    """Return the fastest backend at the longest context, and the context from which it beats sdpa.

    None where sdpa is as fast: it is the plainer one.
    """
    times = {(timing.backend, timing.context): timing.seconds for timing in timings}
    contexts = sorted({timing.context for timing in timings})
    name = min({timing.backend for timing in timings}, key=lambda name: times[name, contexts[-1]])
    least = None
    for context in reversed(contexts):
        if times[name, context] >= MARGIN * times[SDPA, context]:
            break
        least = context
    # The shortest that was measured stands for whatever is shorter.
    return None if least is None else (name, 0 if least == contexts[0] else least)


def _times(name: str, timings: Sequence[Timing]) -> str:
    return f"{name} {_listed([f'{1000 * t.seconds:.3f}' for t in timings if t.backend == name])}"


def _words(shape: AttentionShape) -> str:
    dtype = dtype_name(shape.dtype)
    return f"heads of {shape.head_size} numbers in {dtype} on {shape.device.type}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _set(target: Target, backend: Merged, announce: Callable[[str], None]) -> None:
    name = register(backend)
    target.model.set_attn_implementation(name)
    if target.backbone.implementation != name:
        announce(
            f"target {target.name}: attention {target.backbone.implementation}: the modules of "
            f"{target.config.model_type} take no other"
        )
        return
    if target.backbone.window is not None:
        announce(f"target {target.name}: its layers with a sliding window keep sdpa")
