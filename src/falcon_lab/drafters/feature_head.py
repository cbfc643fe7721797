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

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from falcon_lab.drafters.compiled_passes import CompilablePasses
from falcon_lab.drafters.fusing import Fusing
from falcon_lab.drafters.head_drafting import Drafting
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_passes import HeadForward
from falcon_lab.drafters.head_training import first_pass, unrolled
from falcon_lab.drafters.relaxed_mask import PackedDocuments, find_documents
from falcon_lab.interfaces import (
    DrafterHost,
    DrafterInputs,
    DraftOutput,
    DraftSequences,
    DraftVocabulary,
    FirstWeights,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.passes import EagerPass, ForwardPass, PassMaker

if TYPE_CHECKING:
    from falcon_lab.drafters.tapped_features import TappedFeatures


class FeatureHead(HeadLayers, CompilablePasses, TrainableDrafter):
    """A drafter of blocks of k rows under the relaxed causal mask (k = 1: causal).

    The arguments are those of ``HeadLayers``, whose methods a subclass may override.

    Attributes:
        needs: target features.
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
        maps: nn.Parameter | None = None,
        tapped: TappedFeatures | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        super().__init__(
            host,
            fuse,
            backbone,
            block=block,
            aligned=aligned,
            offsets=offsets,
            maps=maps,
            tapped=tapped,
            vocabulary=vocabulary,
        )
        self.draft_through(EagerPass)

    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes from now on."""
        self._pass = make(HeadForward(self))
        self._drafting = Drafting(self, self._pass)

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

    def first_weights(self) -> FirstWeights:
        """Return what solves for the linear fuse of a head whose blocks begin as the identity."""
        from falcon_lab.drafters.head_weights import HeadWeights  # no round needs it

        return HeadWeights(self)

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
        self._drafting = Drafting(self, self._pass)

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Return the memory of the decoder blocks' keys and values for such a sequence."""
        return self._pass.cache_bytes(self._kv_positions(positions, tree))

    @property
    def kv_allocated(self) -> int:
        """Return the memory that is allocated already, and that the next sequence reuses."""
        return self._pass.reserved_bytes

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Allocate that memory when the first token is computed, and no more later."""
        self._drafting.expect(self._kv_positions(positions, tree))

    def _kv_positions(self, positions: int, tree: TreeBuilder) -> int:
        """Count those of a sequence and of a round's blocks: at most one a node in every pass."""
        passes = -(-tree.max_depth // self.block)
        provisional = max(1, passes * tree.max_nodes) * self.block
        return positions + provisional * (1 if self.offsets is None else 2)

    def observe(self, observation: Observation) -> None:
        """Append positions; the next ``draft`` computes them."""
        self._drafting.observe(0, observation)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Make one pass: over the last k tokens (the root), or F blocks of draft tokens."""
        return self._drafting.draft({0: frontier})[0]

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """Return the one pass, which is traced through the methods that a head may override.

        These are ``join``, ``fuse.until``, ``queries``, ``backbone``, ``carried`` and ``logits``.
        """
        return (self._pass,)

    def sequences(self, count: int, positions: int, tree: TreeBuilder) -> DraftSequences:
        """Return places for ``count`` sequences that are drafted for in one call."""
        return self.drafting(count, positions, tree)

    def drafting(self, count: int, positions: int, tree: TreeBuilder) -> Drafting:
        """Return the head's side of ``count`` sequences of up to so many positions."""
        room = self._kv_positions(positions, tree)
        cache = self.backbone.new_batch_cache(count, room)
        return Drafting(self, EagerPass(HeadForward(self)), count, cache, widest=room - positions)
