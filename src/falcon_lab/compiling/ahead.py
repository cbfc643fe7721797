"""A module compiled ahead of time by inductor, and kept in the cache.

The compiled pass is C++ from its first operation to its last: Python's share of a call is a list
of tensors. Weights are packed for the matrix kernels (inductor's "freezing"), small matrix products
are inductor's own, with what follows them in the same loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from falcon_lab.cache import cache_folder
from falcon_lab.errors import FalconLabError
from falcon_lab.whole_file import replacing

Announce = Callable[[str], None]
Compiled = Callable[[list[Tensor]], list[Tensor]]
"""Tensors in, tensors out, both flat and in the order of the module's own."""


class PassCompiler(Protocol):
    """Makes a pass of a module: ``compile_ahead``, or what stands in for it."""

    def __call__(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        dynamic_shapes: tuple[Any, ...],
        *,
        name: str,
        announce: Announce,
    ) -> Compiled:
        """As ``compile_ahead``."""
        ...


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
