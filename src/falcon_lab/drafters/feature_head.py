"""A base for drafter heads that live on the target's features: Falcon, EAGLE, and yours.

Input t of such a head is (x_{t+1}, g_t): the token one step ahead and what the head reads of the
target at t. Inputs are joined, fused, and sent through decoder blocks in blocks of k; output t is
about position t + k, and a later pass of a round reads it in place of g. A head overrides the
methods of ``HeadLayers`` that it computes in another way (``read``, ``join``, ``logits``,
``predicted``). ``head_training.py`` trains it with block phases, glances and unrolled passes;
``head_drafting.py`` drafts with it, for one sequence or several.

Shapes: B batch, T tokens, F frontier blocks, k block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn

from falcon_lab.drafters.fusing import Fusing
from falcon_lab.drafters.head_compiled import CompiledPass, CompiledPasses
from falcon_lab.drafters.head_drafting import Drafting
from falcon_lab.drafters.head_graphs import GraphPasses
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_passes import Passes
from falcon_lab.drafters.head_training import first_pass, unrolled
from falcon_lab.drafters.relaxed_mask import PackedDocuments, find_documents
from falcon_lab.interfaces import (
    Announce,
    DrafterHost,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    PassCompiler,
    Prediction,
    Recorder,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.compiled import compile_ahead
from falcon_lab.model.recording import recorder_for


class FeatureHead(HeadLayers, TrainableDrafter):
    """A drafter of blocks of k rows under the relaxed causal mask (k = 1: causal).

    The arguments are those of ``HeadLayers``, whose methods a subclass may override.

    Attributes:
        needs: target features.
        passes: what drafting computes with.
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
        super().__init__(host, fuse, backbone, block=block, aligned=aligned, offsets=offsets)
        self.passes = Passes(self)
        self._drafting = Drafting(self, self.passes)

    # --- training -----------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict for every token, with a random block phase a document (if blocks are aligned)."""
        documents = find_documents(inputs.documents)
        phase = self._draw_phase(documents, inputs.generator)
        return first_pass(self, inputs, documents, phase, reveal).prediction

    def predict(
        self, inputs: DrafterInputs, phase: Tensor, reveal: Reveal | None = None
    ) -> Prediction:
        """Compute ``forward`` at a ``phase``, ``[B, T]`` long, constant in a document."""
        return first_pass(self, inputs, find_documents(inputs.documents), phase, reveal).prediction

    def unroll(
        self, inputs: DrafterInputs, reveal: Reveal | None = None, phase: Tensor | None = None
    ) -> Iterator[Prediction]:
        """Yield ``forward``, and then what later drafting passes predict, without end."""
        documents = find_documents(inputs.documents)
        if phase is None:
            phase = self._draw_phase(documents, inputs.generator)
        return unrolled(self, inputs, documents, phase, reveal)

    def _draw_phase(self, documents: PackedDocuments, generator: torch.Generator) -> Tensor:
        if not self.aligned:
            return torch.zeros_like(documents.number)
        phases = torch.randint(
            self.block, (documents.count,), generator=generator, device=generator.device
        )
        return phases.to(documents.number.device)[documents.number]

    # --- drafting -----------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a sequence. (Its first token alone makes no input.)"""
        self._drafting = Drafting(self, self.passes)

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Return the memory of the decoder blocks' keys and values for such a sequence."""
        most = self._kv_positions(positions, tree)
        return self.backbone.layout.bytes(self.passes.capacity(most))

    @property
    def kv_allocated(self) -> int:
        """Return the memory that is allocated already, and that the next sequence takes over."""
        return self.passes.held

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Allocate that memory when the first token is computed, and no more later."""
        self._drafting.expect(self._kv_positions(positions, tree))

    def _kv_positions(self, positions: int, tree: TreeBuilder) -> int:
        """Return the positions of a sequence and its blocks, at most one a node and pass."""
        passes = -(-tree.max_depth // self.block)
        provisional = max(1, passes * tree.max_nodes) * self.block
        most = positions + provisional * (1 if self.offsets is None else 2)
        return most + self.passes.spare

    def observe(self, observation: Observation) -> None:
        """Append positions; the next ``draft`` computes them."""
        self._drafting.observe(0, observation)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Make one pass: over the last k tokens (the root), or F blocks of draft tokens."""
        return self._drafting.draft({0: frontier})[0]

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """The same head and weights where they are, drafting through compiled passes.

        On a GPU they are CUDA graphs, and one sequence is drafted for at a time. A pass is traced
        through ``join``, ``fuse.until``, ``backbone`` and ``logits`` as the head has them. A head
        with ``offsets`` says that it has none, and stays as it is.

        Args:
            announce: takes one line for the user at a time.
            compiler: makes the passes on a CPU; None: inductor, ahead of time.
            recorder: captures graphs; None: on a GPU alone.
        """
        if self.offsets is not None:
            name = type(self).__name__
            announce(f"{name} is not compiled: it asks for its predictions by queries of its own")
            return self
        recorder = recorder or recorder_for(next(self.parameters()).device)
        other = copy.copy(self)
        if recorder is None:
            other.passes = CompiledPasses(self, announce, compiler or compile_ahead)
        else:
            other.passes = GraphPasses(self, announce, recorder)
        other._drafting = Drafting(other, other.passes)
        return other

    @property
    def is_compiled(self) -> bool:
        """Whether its passes are compiled."""
        return self.passes.fast is not None

    def prepare(self, longest: int) -> None:
        """Compile the passes of rounds of up to so many new rows now, if they are to be."""
        if isinstance(fast := self.passes.fast, CompiledPass):
            fast.prepare(longest)

    def sequences(self, count: int, positions: int, tree: TreeBuilder) -> Drafting:
        """Return places for ``count`` sequences that are drafted for in one call."""
        room = self._kv_positions(positions, tree)
        cache = self.backbone.new_batch_cache(count, room)
        return Drafting(self, Passes(self), count, cache, widest=room - positions)
