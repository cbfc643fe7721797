"""Rows of a pass the fast way of a device: compiled on a CPU, CUDA graphs on a GPU.

Shapes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from falcon_lab.interfaces import Announce, PassCompiler, Recorder
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.compiled import CompiledRows
from falcon_lab.model.graphs import GraphRows
from falcon_lab.model.recording import recorder_for

FastRows = CompiledRows | GraphRows


def fast_rows(
    backbone: Backbone,
    head: Callable[[Tensor], Tensor],
    name: str,
    device: torch.device,
    announce: Announce,
    compiler: PassCompiler,
    recorder: Recorder | None = None,
    *,
    older: bool = False,
) -> FastRows:
    """A backbone's passes from tokens to logits.

    Args:
        backbone: where its weights are to stay.
        head: ``[N, H]`` hidden states -> ``[N, V]`` logits.
        name: of the pass, for the user.
        device: where the backbone is.
        announce: takes one line for the user at a time.
        compiler: makes the passes on a CPU.
        recorder: captures graphs; None: on a GPU alone.
        older: masks may be about rows before the new ones too.
    """
    recorder = recorder or recorder_for(device)
    if recorder is not None:
        return GraphRows(backbone, head, name, announce, recorder)
    return CompiledRows(backbone, head, name, announce, compiler, older=older)
