"""A base for drafter heads that live on the target's features: Falcon, EAGLE, and yours.

Row t of such a head is (x_{t+1}, g_t): the token one step ahead and what the head reads of the
target at t. Rows are joined, fused, sent through decoder blocks in blocks of k, and what comes out
at row t speaks of position t + k; a later pass of a round reads it in place of g. A head says how
that is done (``read``, ``join``, ``fuse``, ``backbone``, ``logits``); training with block phases,
glances and unrolled passes, drafting with its cache, prompts in parts, and batches are here.

Shapes: B batch, T rows, k block, C channels of a joined row, L tapped layers, H hidden,
V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from falcon_lab.distill.compiling import Compiled, Compiler
from falcon_lab.drafters.fusing import Fusing
from falcon_lab.drafters.head_batch import HeadSequences
from falcon_lab.drafters.head_compiled import CompiledPass, CompiledPasses
from falcon_lab.drafters.head_decoding import Decoding, Passes
from falcon_lab.drafters.head_graphs import GraphPasses
from falcon_lab.drafters.head_training import Rows, first_pass, unrolled
from falcon_lab.drafters.relaxed_mask import Runs, find_runs
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    DrafterHost,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TreeBuilder,
)
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.compiled import Announce, PassCompiler, compile_ahead
from falcon_lab.model.recording import Recorder, recorder_for

FLEX = "flex_attention"


class FeatureHead(nn.Module):
    """A ``TrainableDrafter`` of blocks of k rows under the relaxed causal mask (k = 1: causal).

    Its weights are those of ``fuse``, ``backbone`` and ``offsets``, and what a subclass adds.

    Attributes:
        block: k.
        needs: target features.
        aligned: whether the newest k rows are one block and training covers every phase; else
            blocks sit at multiples of k.
        offsets: ``[k, H]``, for a head whose k predictions are all asked from the newest row, each
            by a query of its own; None: the last k rows predict.
        passes: what drafting computes with.

    Args:
        host: the frozen target.
        fuse: joined rows to what the decoder blocks read.
        backbone: the decoder blocks.
        block: k.
        aligned: see above.
        offsets: see above.
    """

    needs = frozenset({"features"})

    def __init__(
        self,
        host: DrafterHost,
        fuse: Fusing,
        backbone: Backbone,
        *,
        block: int = 1,
        aligned: bool = True,
        offsets: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.aligned = aligned
        self.host: Any = host
        self.fuse = fuse
        self.backbone = backbone
        self.offsets = offsets
        self.passes: Passes = Passes(fuse, backbone)
        self._compiled: Compiled | None = None
        self._decoding = Decoding(self)

    # --- what a head may say otherwise --------------------------------------------------------

    def read(self, features: Tensor | None, taps: Tensor | None) -> Tensor:
        """What stands beside a token in a row of true positions: the target's features.

        A head that taps layers makes it of ``taps``, ``[..., L, H]``.

        Returns:
            ``[..., H]``, as wide as what the decoder blocks put out.
        """
        if features is None:
            raise ValueError(f"{type(self).__name__} needs target features with every observation")
        return features

    def join(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Rows before fusing: ``[..., n]`` tokens, ``[..., n, H]`` features -> ``[..., n, C]``."""
        embedded = self.host.embed(tokens)
        return torch.cat([embedded, features.to(embedded.dtype)], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the blocks put out, ``[..., H]`` -> ``[..., V]``: by the target's own LM head."""
        logits: Tensor = self.host.head(hidden.to(self.host.dtype))
        return logits

    def predicted(self, hidden: Tensor, where: Rows) -> Prediction:
        """What training compares: here ``hidden``, ``[B, R, H]``, are the target's features."""
        return Prediction(hidden, None, *where)

    # --- training -----------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict every row, with one random block phase a document (if blocks are aligned)."""
        runs = find_runs(inputs.documents)
        phase = self._draw_phase(runs, inputs.generator)
        return first_pass(self, inputs, runs, phase, reveal).prediction

    def predict(
        self, inputs: DrafterInputs, phase: Tensor, reveal: Reveal | None = None
    ) -> Prediction:
        """``forward`` at a given ``phase``, ``[B, T]`` long, constant in a document."""
        return first_pass(self, inputs, find_runs(inputs.documents), phase, reveal).prediction

    def unroll(
        self, inputs: DrafterInputs, reveal: Reveal | None = None, phase: Tensor | None = None
    ) -> Iterator[Prediction]:
        """``forward``, and then what later drafting passes predict, without end (``Unrolls``)."""
        runs = find_runs(inputs.documents)
        if phase is None:
            phase = self._draw_phase(runs, inputs.generator)
        return unrolled(self, inputs, runs, phase, reveal)

    def compile_training(self, compiler: Compiler = torch.compile) -> None:
        """Send the decoder blocks of a training pass through ``torch.compile``.

        Fusing is left as it is, and decoding has shapes of its own.
        """
        self._compiled = Compiled(self.backbone, "the drafter's decoder blocks", compiler)

    def train_blocks(self, **rows: Any) -> Tensor:
        """The decoder blocks in a training pass; the arguments are ``Backbone.forward``'s."""
        on_cpu = rows["positions"].device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and self.backbone.implementation == FLEX:
            raise FalconLabError(
                f"{FLEX} has no backward pass on a CPU; train with target.attention=sdpa"
            )
        fast = self._compiled if self.training and "cache" not in rows else None
        hidden: Tensor = self.backbone(**rows) if fast is None else fast(**rows)
        return hidden

    def _draw_phase(self, runs: Runs, generator: torch.Generator) -> Tensor:
        if not self.aligned:
            return torch.zeros_like(runs.number)
        phases = torch.randint(
            self.block, (runs.count,), generator=generator, device=generator.device
        )
        return phases.to(runs.number.device)[runs.number]

    # --- drafting -----------------------------------------------------------------------------

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

    def observe(self, observation: Observation) -> None:
        """Append rows; the next ``draft`` computes them."""
        self._decoding.observe(observation)

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """One pass: the last k rows (the root), or F blocks of draft tokens."""
        return self._decoding.draft(frontier)

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
        recorder: Recorder | None = None,
    ) -> Self:
        """The same head and weights where they are, drafting through compiled passes.

        On a GPU they are CUDA graphs, and one sequence is drafted for at a time. A pass is traced
        through ``join``, ``fuse.until``, ``backbone`` and ``logits`` as the head has them. A head
        with ``offsets`` says that it has none, and stays as it is.

        Args:
            announce: takes one line for the user at a time.
            compiler: makes the passes on a CPU.
            recorder: captures graphs; None: on a GPU alone.
        """
        if self.offsets is not None:
            name = type(self).__name__
            announce(f"{name} is not compiled: it asks for its predictions by queries of its own")
            return self
        recorder = recorder or recorder_for(next(self.parameters()).device)
        other = copy.copy(self)
        if recorder is None:
            other.passes = CompiledPasses(self, announce, compiler)
        else:
            other.passes = GraphPasses(self, announce, recorder)
        other._decoding = Decoding(other)
        return other

    @property
    def is_compiled(self) -> bool:
        """Whether its passes are compiled."""
        return self.passes.at_once is not None

    def prepare(self, longest: int) -> None:
        """Compile the passes of rounds of up to so many new rows now, if they are to be."""
        if isinstance(at_once := self.passes.at_once, CompiledPass):
            at_once.prepare(longest)

    def sequences(self, rows: int, positions: int, tree: TreeBuilder) -> HeadSequences:
        """Places for ``rows`` sequences that are drafted for in one call."""
        return HeadSequences(self, rows, positions, self._kv_rows(positions, tree))
