"""Falcon's drafter: a semi-autoregressive head that predicts k tokens a pass.

arXiv 2412.12639, §3.1-3.2. Row t is (x_{t+1}, h_t), fused over time and sent through decoder
blocks of the target's own kind under the relaxed causal mask; its output regresses on h_{t+k}.

Shapes: B batch, T rows, A anchors, R prediction rows, k block, H hidden.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from falcon_lab.compiling.ahead import Announce, PassCompiler, compile_ahead
from falcon_lab.compiling.recording import Recorder, recorder_for
from falcon_lab.distillation.compiling import Compiled, Compiler
from falcon_lab.drafters.falcon_batch import FalconSequences
from falcon_lab.drafters.falcon_decoding import Decoding
from falcon_lab.drafters.falcon_graphs import GraphPasses
from falcon_lab.drafters.falcon_passes import CompiledPass, CompiledPasses, Passes
from falcon_lab.drafters.fusing import Fuse
from falcon_lab.drafters.lanes import Lanes
from falcon_lab.drafters.relaxed_mask import (
    Anchors,
    Blocks,
    Runs,
    divide,
    find_anchors,
    find_runs,
    query_mask,
    relaxed_causal_mask,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TreeBuilder,
)
from falcon_lab.targets.backbone import Backbone

if TYPE_CHECKING:
    from falcon_lab.builtins import FalconConfig

FLEX = "flex_attention"


class FalconDrafter(nn.Module):
    """The drafter of ``FalconConfig``; its own weights are the fuse and the decoder blocks.

    Attributes:
        block: k.
        needs: target features.
    """

    needs = frozenset({"features"})

    def __init__(self, config: FalconConfig, context: BuildContext) -> None:
        super().__init__()
        self.block = config.block
        self.config = config
        self.host: Any = context.host
        self.fuse = Fuse(
            config.fuse,
            self.host.hidden_size,
            layers=config.lstm_layers,
            dropout=config.dropout,
        )
        self.backbone = Backbone.short(self.host.config, config.layers)
        self._compiled: Compiled | None = None
        self.offsets: nn.Parameter | None = None
        if config.query == "newest":
            self.offsets = nn.Parameter(0.02 * torch.randn(config.block, self.host.hidden_size))
        self.passes: Passes = Passes(self.fuse, self.backbone)
        self._decoding = Decoding(self)

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict every row, with one random block phase a document (``phase: aligned``)."""
        runs = find_runs(inputs.documents)
        return self._predict(inputs, runs, self._draw_phase(runs, inputs.generator), reveal)

    def predict(
        self, inputs: DrafterInputs, phase: Tensor, reveal: Reveal | None = None
    ) -> Prediction:
        """``forward`` at a given ``phase``, ``[B, T]`` long, constant in a document."""
        return self._predict(inputs, find_runs(inputs.documents), phase, reveal)

    def compile_training(self, compiler: Compiler = torch.compile) -> None:
        """Send the decoder blocks of a training pass through ``torch.compile``.

        The LSTM's kernels are fused as they are, and decoding has shapes of its own.
        """
        self._compiled = Compiled(self.backbone, "the drafter's decoder blocks", compiler)

    def _blocks(self, **rows: Any) -> Tensor:
        on_cpu = rows["positions"].device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and self.backbone.implementation == FLEX:
            raise FalconLabError(
                f"{FLEX} has no backward pass on a CPU; train with target.attention=sdpa"
            )
        through = self._compiled if self._compiled is not None and self.training else self.backbone
        hidden: Tensor = through(**rows)
        return hidden

    def _draw_phase(self, runs: Runs, generator: torch.Generator) -> Tensor:
        if self.config.phase == "absolute":
            return torch.zeros_like(runs.number)
        phases = torch.randint(
            self.block, (runs.count,), generator=generator, device=generator.device
        )
        return phases.to(runs.number.device)[runs.number]

    def _predict(
        self, inputs: DrafterInputs, runs: Runs, phase: Tensor, reveal: Reveal | None
    ) -> Prediction:
        blocks = divide(runs, inputs.positions, phase, self.block)
        if self.offsets is None:
            return self._predict_blocks(inputs, runs, blocks, reveal)
        return self._predict_newest(inputs, runs, blocks, self.offsets, reveal)

    def _predict_blocks(
        self, inputs: DrafterInputs, runs: Runs, blocks: Blocks, reveal: Reveal | None
    ) -> Prediction:
        tokens, features = inputs.tokens, inputs.features
        if reveal is not None:
            tokens = torch.where(reveal.mask, reveal.tokens, tokens)
            features = torch.where(
                reveal.mask.unsqueeze(-1), reveal.features.to(features.dtype), features
            )
        hidden = self._blocks(
            embeddings=self._fuse_documents(tokens, features, runs),
            positions=inputs.positions,
            mask=relaxed_causal_mask(runs, blocks),
        )
        column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        newest = column + (self.block - 1 - blocks.slot)
        return Prediction(
            features=hidden,
            logits=None,
            label=column + self.block,
            source=newest,
            slot=blocks.slot,
            group=blocks.group,
        )

    def _predict_newest(
        self,
        inputs: DrafterInputs,
        runs: Runs,
        blocks: Blocks,
        offsets: Tensor,
        reveal: Reveal | None,
    ) -> Prediction:
        anchors = find_anchors(blocks, self.block)
        context = self._fuse_documents(inputs.tokens, inputs.features, runs)
        anchor = anchors.column.repeat_interleave(self.block, dim=1)  # [B, R]
        slot = torch.arange(self.block, device=anchor.device).repeat(anchors.column.shape[1])
        rows = context.gather(1, anchor.unsqueeze(-1).expand(-1, -1, context.shape[-1]))
        rows = rows + offsets[slot]
        positions = inputs.positions.gather(1, anchor)
        if reveal is not None:
            shown = self._fuse_revealed(reveal)
            rows = torch.where(reveal.mask.unsqueeze(-1), shown, rows)
            # A revealed row stands where the row with this input really is.
            there = (positions + slot + 1).clamp_max(self.host.max_positions - 1)
            positions = torch.where(reveal.mask, there, positions)
        hidden = self._blocks(
            embeddings=torch.cat([context, rows], dim=1),
            positions=torch.cat([inputs.positions, positions], dim=1),
            mask=query_mask(runs, anchors, self.block),
        )
        return self._of_anchors(hidden[:, inputs.tokens.shape[1] :], anchors, anchor, slot)

    def _of_anchors(
        self, hidden: Tensor, anchors: Anchors, anchor: Tensor, slot: Tensor
    ) -> Prediction:
        present = anchors.present.repeat_interleave(self.block, dim=1)
        group = torch.arange(anchor.shape[1], device=anchor.device) // self.block
        return Prediction(
            features=hidden,
            logits=None,
            label=torch.where(present, anchor + 1 + slot, -1),
            source=anchor,
            slot=slot.expand_as(anchor),
            group=group.expand_as(anchor),
        )

    def join(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Rows before fusing: ``[..., L]`` tokens, ``[..., L, H]`` features -> ``[..., L, 2H]``."""
        embedded = self.host.embed(tokens)
        return torch.cat([embedded, features.to(embedded.dtype)], dim=-1)

    def _fuse_documents(self, tokens: Tensor, features: Tensor, runs: Runs) -> Tensor:
        rows = self.join(tokens, features)
        if self.config.fuse != "lstm":
            return self.fuse(rows)[0]
        if rows.device.type != "cpu":
            # cuDNN wants its weights in one piece, and its sequences side by side cost little.
            return runs.pack(self.fuse(runs.unpack(rows))[0])
        lanes = Lanes.of(runs)
        return lanes.gather(self.fuse.anew(*lanes.spread(rows)))

    def _fuse_revealed(self, reveal: Reveal) -> Tensor:
        # The LSTM state at an anchor is not to be had from one pass over the document, so the
        # revealed rows of an anchor run through it as a short document of their own.
        rows = self.join(reveal.tokens, reveal.features)
        short = rows.reshape(-1, self.block, rows.shape[-1])
        return self.fuse(short)[0].reshape(*rows.shape[:-1], -1)

    # --- drafting ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a sequence. (Its first token alone makes no row.)"""
        self._decoding = Decoding(self)

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Memory of the decoder blocks' keys and values for such a sequence."""
        rows = self._kv_rows(positions, tree)
        return self.backbone.layout.bytes(self.passes.capacity(rows))

    @property
    def kv_held(self) -> int:
        """Memory that is taken already, and that the next sequence takes over."""
        return self.passes.held

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Take that memory when the first row is computed, and no more later."""
        self._decoding.expect(self._kv_rows(positions, tree))

    def _kv_rows(self, positions: int, tree: TreeBuilder) -> int:
        """Rows of a sequence, and of a round's blocks: at most one a node in every pass."""
        passes = -(-tree.max_depth // self.block)
        provisional = max(1, passes * tree.max_nodes) * self.block
        rows = positions + provisional * (1 if self.offsets is None else 2)
        return rows + self.passes.spare

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

    def observe(self, observation: Observation) -> None:
        """Append rows; the next ``draft`` computes them."""
        self._decoding.observe(observation)

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """One pass: the last k rows (the root), or F blocks of draft tokens."""
        return self._decoding.draft(frontier)

    def sequences(self, rows: int, positions: int, tree: TreeBuilder) -> FalconSequences:
        """Places for ``rows`` sequences that are drafted for in one call."""
        return FalconSequences(self, rows, positions, self._kv_rows(positions, tree))
