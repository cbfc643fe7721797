"""The fast way to run a pass on a device: compiled on a CPU, CUDA graphs on a GPU.

Imports either when it is asked for, so that eager decoding stands on neither.
"""

from __future__ import annotations

from functools import partial

import torch

from falcon_lab.interfaces import Announce, PassCompiler, Recorder
from falcon_lab.model.passes import PassMaker


def fast_passes(
    device: torch.device,
    announce: Announce,
    compiler: PassCompiler | None = None,
    recorder: Recorder | None = None,
) -> PassMaker:
    """Return what makes the passes of a device.

    Args:
        device: where the modules are, and are to stay.
        announce: is called with one line for the user at a time.
        compiler: compiles the passes on a CPU; None: inductor, ahead of time.
        recorder: captures graphs; None: on a GPU alone.
    """
    from falcon_lab.model.recording import recorder_for

    recorder = recorder or recorder_for(device)
    if recorder is not None:
        from falcon_lab.model.graphs import GraphPass

        return partial(GraphPass, announce=announce, recorder=recorder)
    from falcon_lab.model.compiled import CompiledPass, compile_ahead

    return partial(CompiledPass, announce=announce, compiler=compiler or compile_ahead)
