"""A module compiled ahead of time by inductor, and kept in the cache.

The compiled pass is C++ from its first operation to its last: Python's share of a call is a list
of tensors. Weights are packed for the matrix kernels (inductor's "freezing"), small matrix products
are inductor's own, with what follows them in the same loop.

Decoder blocks compiled for a fixed number of new rows, over the cache of the plain pass.

Shapes: n new rows, N rows of the compiled pass (n and padding), W columns of a mask, S keys (cached
rows and the N), C capacity, G key/value heads, D head size, L tapped layers, H hidden,
V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from falcon_lab.errors import FalconLabError
from falcon_lab.files import cache_folder, replacing
from falcon_lab.interfaces import Announce, Compiled, PassCompiler
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import KVCache


def compile_ahead(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    name: str,
    announce: Announce,
) -> Compiled:
    """Compile a module for inputs like these, or load what was compiled before.

    What is kept belongs to the module's operations and weights, the shapes, the version of torch,
    the processor and the number of threads; anything else is compiled anew.

    Args:
        module: writes into its inputs in place if it likes; returns tensors.
        inputs: an example.
        dynamic_shapes: as ``torch.export.export`` takes them.
        name: of the pass, for the user and for the file.
        announce: takes one line for the user at a time.

    Raises:
        FalconLabError: the module cannot be traced, or there is no working C++ compiler.
    """
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
        path = cache_folder() / "compiled" / f"{name}-{_key(program, inputs, threads)}.pt2"
        if not path.exists():
            announce(f"compiling {name}, once: kept in {path}")
            _build(program, path, threads)
        loaded = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    except Exception as error:  # whatever tracing, inductor or the C++ compiler throw
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FalconLabError(
            f"{name} cannot be compiled ({reason}); set decoding.compile=none"
        ) from error
    run: Compiled = loaded.loader.boxed_run
    return run


def _build(program: torch.export.ExportedProgram, path: Path, threads: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "freezing": True,
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "CPP",
        "cpp.threads": threads,
        # The code that strings the kernels together is long, and nothing is gained by -O1 there.
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    with replacing(path) as temporary:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(temporary), inductor_configs=options
        )


def _key(program: torch.export.ExportedProgram, inputs: Sequence[Any], threads: int) -> str:
    found = hashlib.sha256()
    capability = torch.backends.cpu.get_cpu_capability()
    for part in (torch.__version__, capability, threads, program.graph_module.code):
        found.update(f"{part}\n".encode())
    for tensor in _tensors(inputs):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    kept = {**program.state_dict, **program.constants}
    for key, value in sorted(kept.items()):
        found.update(key.encode())
        if isinstance(value, Tensor):
            plain = value.detach().contiguous().cpu().flatten()
            found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        found += _tensors(value) if isinstance(value, list | tuple) else [value]
    return found


SIZES = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Rows that a pass is compiled for; a few more rows of nothing cost less than another pass to
compile."""

SPARE = 80
"""Cache rows beyond what is needed: for the padding of a pass, and so that no cache is too small
for what a compiled pass takes for granted."""

LEAST = 2
"""Rows of context that a compiled pass takes for granted: tracing tells one from several."""


def size_for(rows: int) -> int:
    """N for n rows.

    Raises:
        FalconLabError: that many rows are read by the plain pass alone.
    """
    for size in SIZES:
        if rows <= size:
            return size
    raise FalconLabError(f"{rows} rows are more than a compiled pass reads ({SIZES[-1]})")


class CompiledRows:
    """The decoder blocks of a backbone, from tokens to logits.

    Args:
        backbone: its weights are copied into the compiled pass.
        head: ``[N, H]`` hidden states -> ``[N, V]`` logits.
        name: of the pass, for the user.
        announce: takes one line for the user at a time.
        compiler: makes a pass of what is traced.
        taps: layers whose hidden states are put out too.
        older: masks may be about rows before the new ones too.

    Attributes:
        spare: cache rows that a pass needs beyond those of its sequence.
        held: bytes of the last cache that the next one takes over: none.
    """

    spare = SPARE
    held = 0

    def __init__(
        self,
        backbone: Backbone,
        head: Callable[[Tensor], Tensor],
        name: str,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
        taps: Sequence[int] = (),
        *,
        older: bool = False,
    ) -> None:
        self._compiler = compiler
        self._parts = backbone, head, name
        self._older = older
        self._traced = Rows(backbone, head, taps)
        self._tapped: dict[tuple[int, ...], Self] = {}
        self._keys = Keys(backbone)
        self._name = name
        self._announce = announce
        self._passes: dict[tuple[int, int], Compiled] = {}
        self._all = torch.ones(SIZES[-1], SIZES[-1], dtype=torch.bool)

    def tapped(self, layers: Sequence[int]) -> Self:
        """Other passes, which put out the hidden states of layers too; the same every time."""
        if (key := tuple(layers)) not in self._tapped:
            parts = *self._parts, self._announce, self._compiler
            self._tapped[key] = type(self)(*parts, taps=key, older=self._older)
        return self._tapped[key]

    def takes(self, new: int, cache: KVCache) -> bool:
        """Whether there is a pass for so many rows: not for prompts."""
        return cache.length >= LEAST and new <= SIZES[-1]

    def capacity(self, rows: int) -> int:
        """Rows of the cache that a sequence of so many needs."""
        return rows + self.spare

    def prepare(self, most: int) -> None:
        """Compile or load the passes for up to so many rows now, and not when they are needed."""
        for size in SIZES:
            self._pass(size)
            if size >= most:
                return

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> tuple[Tensor, ...]:
        """Append n rows to the cache.

        Args:
            tokens: ``[n]`` long.
            positions: ``[n]`` long.
            mask: ``[n, n]`` bool, who sees whom among the new rows, or with ``older`` ``[n, W]``,
                among the last W keys, W >= n; None: every row sees every key.
            cache: of one sequence, with ``SPARE`` rows to spare and something in it.

        Returns:
            Hidden states ``[n, H]``, logits ``[n, V]`` and, with taps, ``[n, L, H]``.
        """
        new, size = tokens.shape[0], size_for(tokens.shape[0])
        mask = self._all[:new, :new] if mask is None else mask
        columns = self._keys.noted(positions, size, cache)
        if size > new:
            tokens = functional.pad(tokens, (0, size - new))
            positions, mask = padded(positions, mask, size - new)
        keys, values = cache.tensors()
        outputs = self._pass(size)([tokens, positions, mask, columns, *keys, *values])
        cache.advance(new)
        return tuple(output[:new] for output in outputs)

    def _pass(self, size: int) -> Compiled:
        """The pass of that size, whatever the length of the context and of the cache."""
        key = (size, torch.get_num_threads())
        run = self._passes.get(key)
        if run is None:
            keys, values, columns, shapes = self._keys.example(size)
            numbers = torch.zeros(size, dtype=torch.long)
            mask = torch.ones(size, size + self._older, dtype=torch.bool)
            width = {1: torch.export.Dim("width", min=1, max=2**16)} if self._older else {}
            run = self._passes[key] = self._compiler(
                self._traced,
                (numbers, numbers.clone(), mask, columns, keys, values),
                ({}, {}, width, shapes.columns, shapes.rows, shapes.rows),
                name=f"{self._name}{'-tapped' if self._traced.taps else ''}-{size}-rows",
                announce=self._announce,
            )
        return run


class Rows(nn.Module):
    """What is traced: a backbone whose cache is made of the inputs."""

    def __init__(
        self, backbone: Backbone, head: Callable[[Tensor], Tensor], taps: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.taps = tuple(taps)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        columns: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """``columns``: ``[S]``, as of ``Slices``."""
        cache = Slices(keys, values, columns, tokens.shape[0])
        rows = {"tokens": tokens[None], "positions": positions[None], "mask": mask[None]}
        hidden, *taps = self.backbone.tapped(self.taps, **rows, cache=cache)
        return hidden[0], self.head(hidden[0]), *(states[0] for states in taps)


class Slices(Cache):
    """As ``KVCache``, for tracing: rows go where the shapes of the inputs say.

    Args:
        keys, values: of every layer, ``[1, G, C, D]``.
        columns: ``[S]`` long, as many as there are keys: their positions, where layers have a
            window, else any numbers.
        new: rows of the pass.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], columns: Tensor, new: int) -> None:
        super().__init__(layers=[])
        self._keys, self._values = keys, values
        self._columns = columns
        self._new = new

    @property
    def length(self) -> int:
        """Rows before those of the pass."""
        return self._columns.shape[0] - self._new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows; all its rows."""
        keys, values, stop = self._keys[layer_idx], self._values[layer_idx], self.length + self._new
        keys[:, :, self.length : stop] = key_states
        values[:, :, self.length : stop] = value_states
        return keys[:, :, :stop], values[:, :, :stop]

    def record_positions(self, positions: Tensor) -> Tensor:
        """``[1, S]``, of all keys."""
        return torch.cat((self._columns[None, : self.length], positions), dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As ``length``."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a query of that length sees, and their offset."""
        return self.length + query_length, 0


def padded(positions: Tensor, mask: Tensor, more: int) -> tuple[Tensor, Tensor]:
    """Positions ``[n]`` and mask ``[n, W]`` with so many rows of nothing behind them.

    Those see what is before and themselves, and nobody sees them.
    """
    new, width = mask.shape
    wider = mask.new_zeros(new + more, width + more)
    wider[:new, :width] = mask
    wider.diagonal(width - new)[new:] = True
    return functional.pad(positions, (0, more)), wider


class Shapes(NamedTuple):
    """Which dimensions of a cache vary, as ``torch.export.export`` takes them."""

    columns: dict[int, Any]
    rows: list[dict[int, Any]]


class Keys:
    """Caches to trace with.

    Args:
        backbone: whose layers they are for.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._columns = torch.empty(0, dtype=torch.long)

    def columns(self, stop: int) -> Tensor:
        """``[stop]`` long, 0, 1, 2, …: a slice of a table that is made once."""
        if self._columns.shape[0] < stop:
            self._columns = torch.arange(2 * stop)
        return self._columns[:stop]

    def noted(self, positions: Tensor, size: int, cache: KVCache) -> Tensor:
        """Note the positions ``[n]`` of new rows; ``[S]`` columns for a pass of N rows."""
        stop = cache.length + size
        if cache.positions is None:
            return self.columns(stop)
        cache.record_positions(positions[None])
        return cache.positions[0, :stop]

    def example(self, new: int) -> tuple[list[Tensor], list[Tensor], Tensor, Shapes]:
        """Keys, values, columns and their shapes for a pass over ``new`` rows.

        Raises:
            FalconLabError: a layer keeps no rows of its own.
        """
        layers = [layer for layer in self._backbone.layout.layers if layer is not None]
        if len(layers) < len(self._backbone.layout.layers):
            raise FalconLabError("not every layer has keys and values of its own")
        capacity = 2 * SPARE + new
        sides = [
            [torch.zeros(1, heads, capacity, size, dtype=layer.dtype) for heads, size in sizes]
            for layer in layers
            for sizes in [(layer.key, layer.value)]
        ]
        seen = torch.export.Dim("seen", min=new + LEAST, max=2**20)
        room = torch.export.Dim("room", min=SPARE, max=2**21)
        shapes = Shapes({0: seen}, [{2: room}] * len(layers))
        columns = torch.arange(new + SPARE // 2)
        return [side[0] for side in sides], [side[1] for side in sides], columns, shapes
