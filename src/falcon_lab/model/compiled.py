"""A module compiled ahead of time by inductor, and kept in the cache.

The compiled pass is C++ from its first operation to its last: Python's share of a call is a list
of tensors. Weights are packed for the matrix kernels (inductor's "freezing"), which are inductor's
own, with what follows them in the same loop, or oneDNN's (``matrix_kernels``).

A pass is compiled for a few numbers of new positions, which are padded; the lengths of context and
cache stay open. It writes into the cache that the eager pass uses.

Shapes: n new positions, N the same with padding, W columns of a mask, S keys (cached ones and the
N), C capacity, G key/value heads, D head size.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from falcon_lab.errors import FalconLabError, first_line
from falcon_lab.files import about, cache_folder, make_folder, refuse_strangers, replacing
from falcon_lab.interfaces import Announce, Compiled, Outputs, PassCompiler
from falcon_lab.model.passes import (
    Forward,
    ForwardPass,
    Inputs,
    NewPositions,
    Shapes,
    pad_to,
    shapes_of,
)
from falcon_lab.model.precision import cpu_units


@torch.no_grad()  # where gradients are wanted, inductor packs no weights, and does not say so
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
        dynamic_shapes: as for ``torch.export.export``.
        name: of the pass, for the user and for the file.
        announce: is called with one line for the user at a time.

    Raises:
        FalconLabError: the module cannot be traced, there is no working C++ compiler, or what is
            kept belongs to somebody else.
    """
    folder = _folder()
    with _compiling(name):
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
        options = _options(program)
        path = folder / f"{name}-{_key(program, inputs, options)}.pt2"
    for trusted in (folder, path):
        refuse_strangers(trusted, "run as native code")
    with _compiling(name):
        if not path.exists():
            announce(f"compiling {name}, once: kept in {path}")
            _build(program, path, options)
        loaded = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    run: Compiled = loaded.loader.boxed_run
    return run


def check_compiler() -> None:
    """See that passes can be compiled here, or have been.

    Raises:
        FalconLabError: there is no C++ compiler, and nothing is kept in the cache.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None and not any(_folder().glob("*.pt2")):
        raise FalconLabError(
            f"decoding.compile needs a C++ compiler, and there is no {compiler}; install one, name "
            "it in CXX, or set decoding.compile=none"
        )


def _folder() -> Path:
    return cache_folder() / "compiled"


@contextmanager
def _compiling(name: str) -> Iterator[None]:
    """Name the pass that cannot be compiled, and the way out."""
    try:
        yield
    except Exception as error:  # whatever tracing, inductor or the C++ compiler throw
        raise FalconLabError(
            f"{name} cannot be compiled ({first_line(error)}); set decoding.compile=none"
        ) from error


def matrix_kernels(dtypes: Set[torch.dtype]) -> dict[str, Any]:
    """Choose whose matrix kernels a pass is compiled with, as inductor's options.

    Inductor's own know half precision by AMX alone: without it they turn every weight into float32
    first, and a pass of six tokens takes six times as long as with oneDNN's packed weights, one of
    a single token twice. In float32 either may be faster (inductor's 1.7 times for one token of
    width 576, oneDNN's 2.1 times for six), so inductor times both while it compiles.

    Args:
        dtypes: of the pass's weights.
    """
    half = not dtypes.isdisjoint((torch.bfloat16, torch.float16))
    if half and not cpu_units().get("amx_bf16"):
        return {"max_autotune_gemm": False}
    return {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP,ATEN"}


def _options(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Return inductor's options for a pass, on the threads that torch has now."""
    return {
        "freezing": True,
        "cpp.threads": torch.get_num_threads(),
        # The code that strings the kernels together is long, and nothing is gained by -O1 there.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        **matrix_kernels({part.dtype for part in _kept(program).values()}),
    }


def _build(program: torch.export.ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    make_folder(path.parent)
    with about(path), replacing(path) as temporary:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(temporary), inductor_configs=options
        )


def _key(
    program: torch.export.ExportedProgram, inputs: Sequence[Any], options: dict[str, Any]
) -> str:
    found = hashlib.sha256()
    capability = torch.backends.cpu.get_cpu_capability()
    for part in (torch.__version__, capability, options, program.graph_module.code):
        found.update(f"{part}\n".encode())
    for tensor in _tensors(inputs):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    for key, value in sorted(_kept(program).items()):
        found.update(key.encode())
        plain = value.detach().contiguous().cpu().flatten()
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _kept(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """Return name -> weight, buffer or constant of a program."""
    kept = {**program.state_dict, **program.constants}
    return {key: value for key, value in kept.items() if isinstance(value, Tensor)}


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        found += _tensors(value) if isinstance(value, list | tuple) else [value]
    return found


SIZES = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Numbers of new positions that a pass is compiled for: a few more in the padding cost less than
another pass to compile."""

PADDING = 80
"""Cache positions beyond what is needed: for the padding of a pass, and so that no cache is too
small for what a compiled pass assumes."""

CONTEXT = 2
"""Positions of context that a compiled pass assumes: tracing distinguishes one from several."""


class CompiledPass(ForwardPass):
    """A forward compiled ahead of time, for each of the padded shapes that come.

    Args:
        forward: its weights are copied into the compiled passes.
        announce: is called with one line for the user at a time.
        compiler: compiles a pass.
    """

    padding = PADDING

    def __init__(
        self, forward: Forward, announce: Announce, compiler: PassCompiler = compile_ahead
    ) -> None:
        super().__init__(forward)
        self._traced = Traced(forward)
        self._announce, self._compiler = announce, compiler
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        self._all = torch.ones(SIZES[-1], SIZES[-1], dtype=torch.bool)
        self._index = torch.empty(0, dtype=torch.long)  # 0, 1, 2, …

    def supports(self, inputs: Inputs, new: NewPositions | None) -> bool:
        """Return whether there is a pass for such inputs: not for prompts."""
        if new is not None:
            cache, count = new.cache, new.positions.shape[0]
            roomy = cache.length + SIZES[-1] <= cache.capacity >= PADDING
            if count > SIZES[-1] or cache.length < CONTEXT or not roomy:
                return False
        return self._forward.supports(inputs) and self._forward.compiles(inputs)

    def prepare(self, most: int) -> None:
        """Compile or load the passes of such rounds now, and not when they are needed."""
        for inputs in self._forward.examples(min(most, SIZES[-1])):
            if self._forward.supports(inputs) and self._forward.compiles(inputs):
                given = self._forward.with_indices(inputs)
                self._pass(given, self._forward.padded(shapes_of(given), SIZES))

    def _run(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        forward = self._forward
        given = forward.with_indices(inputs)
        shapes = shapes_of(given)
        padded = forward.padded(shapes, SIZES)
        run = self._pass(given, padded)
        if padded != shapes:
            given = [pad_to(part, shape) for part, shape in zip(given, padded, strict=True)]
        if new is not None:
            given = [*given, *self._appended(new, forward.count(padded))]
        outputs = tuple(run(given))
        if new is not None:
            new.cache.advance(new.positions.shape[0])
        return outputs if padded == shapes else forward.trimmed(outputs, inputs)

    def _appended(self, new: NewPositions, size: int) -> list[Tensor]:
        """Return positions ``[N]``, mask ``[N, W]``, columns ``[S]``, and keys and values of every
        layer, ``[1, G, C, D]`` each."""
        positions, mask, cache = new
        count, stop = positions.shape[0], cache.length + size
        if mask is None:
            mask = self._all[:count, :count]
        if cache.positions is None:
            columns = self._up_to(stop)
        else:
            cache.record_positions(positions[None])
            columns = cache.positions[0, :stop]
        if size > count:
            positions, mask = _padded(positions, mask, size - count)
        keys, values = cache.tensors()
        return [positions, mask, columns, *keys, *values]

    def _up_to(self, stop: int) -> Tensor:
        """Return ``[stop]`` long, 0, 1, 2, …: a slice of a table that is made once."""
        if self._index.shape[0] < stop:
            self._index = torch.arange(2 * stop)
        return self._index[:stop]

    def _pass(self, given: Inputs, padded: Shapes) -> Compiled:
        """Return the pass for inputs of these shapes, whatever the context and the cache are."""
        key = (torch.get_num_threads(), *padded)
        run = self._compiled.get(key)
        if run is None:
            run = self._compiled[key] = self._compile(given, padded)
        return run

    def _compile(self, given: Inputs, padded: Shapes) -> Compiled:
        parts = zip(given, padded, strict=True)
        example: list[Any] = [[torch.zeros(shape, dtype=part.dtype) for part, shape in parts]]
        shapes: list[Any] = [[{} for _ in padded]]
        if self._forward.layout.layers:
            more, dynamic = self._example(self._forward.count(padded))
            example, shapes = [*example, *more], [*shapes, *dynamic]
        return self._compiler(
            self._traced,
            tuple(example),
            tuple(shapes),
            name=self._forward.label(padded),
            announce=self._announce,
        )

    def _example(self, new: int) -> tuple[list[Any], list[Any]]:
        """Return what ``_appended`` gives for N new positions, and which dimensions of it vary.

        Raises:
            FalconLabError: a layer stores nothing of its own.
        """
        layout = self._forward.layout
        layers = [layer for layer in layout.layers if layer is not None]
        if len(layers) < len(layout.layers):
            raise FalconLabError("not every layer has keys and values of its own")
        capacity = 2 * PADDING + new
        sides = [
            [torch.zeros(1, heads, capacity, size, dtype=layer.dtype) for heads, size in sizes]
            for sizes, layer in (((one.key, one.value), one) for one in layers)
        ]
        wide = self._forward.wide_mask
        columns = torch.arange(new + PADDING // 2)
        example = [
            torch.zeros(new, dtype=torch.long),
            torch.ones(new, new + wide, dtype=torch.bool),  # as wide as new is taken for a constant
            columns,
            *([side[which] for side in sides] for which in (0, 1)),
        ]
        width = {1: torch.export.Dim("width", min=1, max=2**16)} if wide else {}
        seen = {0: torch.export.Dim("seen", min=new + CONTEXT, max=2**20)}
        room = [{2: torch.export.Dim("room", min=PADDING, max=2**21)}] * len(layers)
        return example, [{}, width, seen, room, room]


class Traced(nn.Module):
    """What is traced: a forward whose cache is made of the inputs."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.inner = forward

    def forward(
        self,
        inputs: list[Tensor],
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        columns: Tensor | None = None,
        keys: list[Tensor] | None = None,
        values: list[Tensor] | None = None,
    ) -> Outputs:
        """Run the forward; ``columns`` ``[S]`` as of ``Slices``."""
        if positions is None or columns is None or keys is None or values is None:
            return self.inner.traced(inputs, None)
        cache = Slices(keys, values, columns, positions.shape[0])
        return self.inner.traced(inputs, NewPositions(positions, mask, cache))


class Slices(Cache):
    """As ``KVCache``, for tracing: new positions go where the shapes of the inputs say.

    Args:
        keys, values: of every layer, ``[1, G, C, D]``.
        columns: ``[S]`` long, as many as there are keys: their positions, where layers have a
            window, else any numbers.
        new: positions of the pass.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], columns: Tensor, new: int) -> None:
        super().__init__(layers=[])
        self._keys, self._values = keys, values
        self._columns = columns
        self._new = new

    @property
    def length(self) -> int:
        """Return the number of positions before those of the pass."""
        return self._columns.shape[0] - self._new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return all of them."""
        keys, values, stop = self._keys[layer_idx], self._values[layer_idx], self.length + self._new
        keys[:, :, self.length : stop] = key_states
        values[:, :, self.length : stop] = value_states
        return keys[:, :, :stop], values[:, :, :stop]

    def record_positions(self, positions: Tensor) -> Tensor:
        """Return ``[1, S]``, of all keys."""
        return torch.cat((self._columns[None, : self.length], positions), dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return ``length``."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the keys that a query of that length attends to, and their offset."""
        return self.length + query_length, 0


def _padded(positions: Tensor, mask: Tensor, more: int) -> tuple[Tensor, Tensor]:
    """Put padding behind positions ``[n]`` and a mask ``[n, W]``.

    It attends to what is before and to itself, and nothing attends to it.
    """
    new, width = mask.shape
    wider = mask.new_zeros(new + more, width + more)
    wider[:new, :width] = mask
    wider.diagonal(width - new)[new:] = True
    return functional.pad(positions, (0, more)), wider
