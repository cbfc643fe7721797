"""The fast way to run a pass on a device: compiled on a CPU, CUDA graphs on a GPU."""

from __future__ import annotations

from functools import partial

import torch

from falcon_lab.interfaces import Announce, PassCompiler, Recorder
from falcon_lab.model.compiled import CompiledPass, compile_ahead
from falcon_lab.model.graphs import GraphPass
from falcon_lab.model.passes import PassMaker
from falcon_lab.model.recording import recorder_for


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
    recorder = recorder or recorder_for(device)
    if recorder is not None:
        return partial(GraphPass, announce=announce, recorder=recorder)
    return partial(CompiledPass, announce=announce, compiler=compiler or compile_ahead)
