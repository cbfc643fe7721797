"""Falcon's drafter: a semi-autoregressive head that predicts k tokens a pass.

arXiv 2412.12639, §3.1-3.2. Row t is (x_{t+1}, h_t), fused over time and sent through decoder
blocks of the target's own kind under the relaxed causal mask; its output regresses on h_{t+k}.

Shapes: k block, H hidden.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from falcon_lab.compiling.ahead import Announce, PassCompiler, compile_ahead
from falcon_lab.compiling.recording import Recorder, recorder_for
from falcon_lab.drafters.falcon_graphs import GraphPasses
from falcon_lab.drafters.falcon_passes import CompiledPass, CompiledPasses
from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fuse
from falcon_lab.drafters.head_decoding import Decoding
from falcon_lab.protocols import BuildContext
from falcon_lab.targets.backbone import Backbone

if TYPE_CHECKING:
    from falcon_lab.builtins import FalconConfig


class FalconDrafter(FeatureHead):
    """The drafter of ``FalconConfig``: a ``FeatureHead`` of the target's own decoder blocks."""

    def __init__(self, config: FalconConfig, context: BuildContext) -> None:
        width = context.host.hidden_size
        fuse = Fuse(config.fuse, width, layers=config.lstm_layers, dropout=config.dropout)
        backbone = Backbone.short(context.host.config, config.layers)
        offsets: nn.Parameter | None = None
        if config.query == "newest":
            offsets = nn.Parameter(0.02 * torch.randn(config.block, width))
        super().__init__(
            context.host,
            fuse,
            backbone,
            block=config.block,
            aligned=config.phase == "aligned",
            offsets=offsets,
        )
        self.config = config

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
        recorder: Recorder | None = None,
    ) -> Self:
        """The same drafter and weights where they are, drafting through compiled passes.

        On a GPU they are CUDA graphs, and one sequence is drafted for at a time.

        Args:
            announce: takes one line for the user at a time.
            compiler: makes the passes on a CPU.
            recorder: captures graphs; None: on a GPU alone.
        """
        other = copy.copy(self)
        recorder = recorder or recorder_for(next(self.parameters()).device)
        if recorder is None:
            other.passes = CompiledPasses(self, announce, compiler)
        else:
            other.passes = GraphPasses(self, announce, recorder)
        other._decoding = Decoding(other)
        return other

    def prepare(self, longest: int) -> None:
        """Compile the passes of rounds of up to so many new rows now, if they are to be."""
        if isinstance(at_once := self.passes.at_once, CompiledPass):
            at_once.prepare(longest)
