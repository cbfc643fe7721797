"""A masked diffusion language model as drafter (DiffuSpec, arXiv 2510.02358; SpecDiff, 2408.05636).

Behind the text stand masks; one pass of the model says what each of them hides, and further passes
read some of that again in the masks' place (denoising steps).

A draft's q. The rows that are put out are the model's distributions in the last step, where every
token that was fixed in a step before has all mass of its own row. Given all that was fixed, tokens
are drawn from their rows one by one; so the residual rule is right, whatever led to what was fixed.

Shapes: B batch, T tokens, A anchors, k block, n tokens of a pass, R rows of training, H hidden, V
vocabulary (the draft vocabulary, where there is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from falcon_lab.drafters.compiled_passes import CompilablePasses
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    Announce,
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    PassCompiler,
    Prediction,
    Recorder,
    Reveal,
    RoundContext,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.masks import causal_mask, packed_mask
from falcon_lab.model.passes import EagerPass, ForwardPass, NewPositions, PassMaker
from falcon_lab_diffusion import DiffusionConfig, masking
from falcon_lab_diffusion.masked_model import (
    MASK,
    FirstLayers,
    MaskedForward,
    MaskedModel,
    Pretrained,
)
from falcon_lab_diffusion.masking import Anchors, Noise

CAPACITY = 512
"""Positions of a cache where the length of the text is unknown."""

FEW = 64
"""Tokens up to which a pass computes the logits of all."""


class DiffusionDrafter(CompilablePasses, TrainableDrafter):
    """The drafter of ``DiffusionConfig``; it reads tokens alone.

    Attributes:
        block: k.
        needs: nothing of the target.
        max_passes: one; a block is all there is to a round.
        model: the masked language model.

    Args:
        config: the options.
        context: gives the target.
    """

    needs: frozenset[str] = frozenset()
    max_passes = 1

    def __init__(self, config: DiffusionConfig, context: BuildContext) -> None:
        super().__init__()
        self.block, self.config = config.block, config
        self.host: Any = context.host
        words = context.draft_vocabulary(config.draft_vocabulary)
        self.draft_vocabulary = words
        self.pretrained = config.model is not None
        self.model: MaskedModel = (
            Pretrained(config, context.host)
            if self.pretrained
            else FirstLayers(config, context.host, words)
        )
        self._caches = (config.attention or ("block", "bidirectional")[self.pretrained]) == "block"
        self._ahead = int(config.shift)  # rows of a block that need no mask
        self.draft_through(EagerPass)

    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes from now on."""
        self._pass = make(MaskedForward(self.model))
        self._room = CAPACITY
        self._forget()

    def _forget(self) -> None:
        self._cache: KVCache | None = None
        self._text: list[Tensor] = []  # [M] each, what is not in the cache; the root last
        self._known = 0  # tokens of the text that the model reads
        self._begun: RoundContext | None = None

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict hidden tokens.

        Where noise hides a part of a block, its rows depend on what is shown of it; in evaluation
        nothing is, as in the first pass of a draft.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        if reveal is not None:
            raise FalconLabError(
                "drafter diffusion hides and shows labels by its own noise; set glancing.name=none"
            )
        noisy = self.training and self.config.noise == "mdlm"
        if noisy and not self._caches:
            drawn = masking.document_noise(inputs.documents, inputs.generator)
            return self.whole_documents(inputs, drawn)
        if self._caches:
            anchors = masking.draw_anchors(inputs.documents, self.config.anchors, inputs.generator)
        else:
            anchors = masking.draw_cuts(inputs.documents, inputs.generator)
        shape = (*anchors.at.shape, self.block)
        noise = masking.block_noise(shape, inputs.generator) if noisy else None
        return self.blocks(inputs, anchors, noise)

    def blocks(
        self, inputs: DrafterInputs, anchors: Anchors, noise: Noise | None = None
    ) -> Prediction:
        """Predict the k tokens behind every anchor.

        Args:
            inputs: of the step.
            anchors: ``[B, A]``, the newest true token of each block.
            noise: ``[B, A, k]``, which of its tokens are hidden; None: all, and all weigh alike.
        """
        at, device = anchors.at, inputs.tokens.device
        masks = self.block - self._ahead
        place = at[..., None] + torch.arange(1, self.block + 1, device=device)  # [B, A, k]
        hidden = self._hidden(inputs, at, place, noise)
        true = inputs.tokens.gather(1, place.clamp_max(inputs.tokens.shape[1] - 1).flatten(1))
        read = true.view(place.shape).masked_fill(hidden, MASK)[..., :masks]
        start = inputs.positions.gather(1, at)[..., None] + self.model.first
        positions = start + torch.arange(1, masks + 1, device=device)
        states = self.model(
            torch.cat((inputs.tokens, read.flatten(1)), 1),
            torch.cat((inputs.positions + self.model.first, positions.flatten(1)), 1),
            self._mask(inputs.documents, anchors, masks),
        )
        rows = self._rows(states, at, masks)
        slot = torch.arange(self.block, device=device).expand_as(place)
        shown = torch.where(hidden, at[..., None], place)[..., :masks]
        newest = torch.cat((at[..., None], shown), -1).amax(-1, keepdim=True)
        counts = hidden & anchors.real[..., None]
        weight = None if noise is None else noise.weight.to(device).flatten(1)
        number = torch.arange(at.shape[1], device=device)[:, None].expand_as(place)
        return self._prediction(
            rows.flatten(1, 2),
            place.masked_fill(~counts, -1).flatten(1),
            newest.expand_as(place).flatten(1),
            slot.flatten(1),
            number.flatten(1),
            weight,
        )

    def whole_documents(self, inputs: DrafterInputs, noise: Noise) -> Prediction:
        """Predict hidden tokens, ``[B, T]``, anywhere in the documents, by all that is shown."""
        documents = inputs.documents
        column = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        states = self.model(
            inputs.tokens.masked_fill(noise.hidden, MASK),
            inputs.positions + self.model.first,
            masking.document_mask(documents),
        )
        label = column + self._ahead
        inside = label < documents.shape[1]
        there = label.clamp_max(documents.shape[1] - 1)
        counts = inside & noise.hidden.gather(1, there)
        counts &= documents.gather(1, there) == documents
        return self._prediction(
            states,
            label.masked_fill(~counts, -1),
            masking.last_of_document(documents),
            torch.zeros_like(column),
            column,
            noise.weight.gather(1, there),
        )

    def _hidden(
        self, inputs: DrafterInputs, at: Tensor, place: Tensor, noise: Noise | None
    ) -> Tensor:
        """Return ``[B, A, k]`` bool: what noise hides, and all that is of no document."""
        if noise is None:
            return torch.ones_like(place, dtype=torch.bool)
        documents = inputs.documents
        last = documents.shape[1] - 1
        there = place.clamp_max(last).flatten(1)
        theirs = documents.gather(1, there).view(place.shape)
        real = masking.with_next(documents).gather(1, there).view(place.shape)
        inside = (place <= last) & real & (theirs == documents.gather(1, at)[..., None])
        return noise.hidden.to(place.device) | ~inside

    def _mask(self, documents: Tensor, anchors: Anchors, masks: int) -> Tensor:
        if self._caches:
            return masking.block_mask(packed_mask(documents), documents, anchors.at, masks)
        return masking.full_mask(documents, anchors, masks)

    def _rows(self, states: Tensor, at: Tensor, masks: int) -> Tensor:
        """Return ``[B, A, k, H]``, the states that predict, of tokens and the masks behind."""
        tokens = states.shape[1] - at.shape[1] * masks
        behind = states[:, tokens:].reshape(*at.shape, masks, states.shape[-1])
        if not self._ahead:
            return behind
        width = states.shape[-1]
        roots = states.gather(1, at[..., None].expand(-1, -1, width))
        return torch.cat((roots[:, :, None], behind), 2)

    def _prediction(
        self,
        rows: Tensor,
        label: Tensor,
        source: Tensor,
        slot: Tensor,
        group: Tensor,
        weight: Tensor | None,
    ) -> Prediction:
        return Prediction(None, None, label, source, slot, group, self._head, rows, weight)

    def _head(self, rows: Tensor, slot: Tensor) -> Tensor:
        return self.model.logits(rows)

    # --- drafting ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        self._forget()
        if not self.model.first:
            self._append(first.reshape(1))

    def begin_round(self, context: RoundContext) -> None:
        """Draft no more than the round may spend, and draw as its tokens are drawn."""
        self._begun = context

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Count the bytes of the KV cache for such a text, with a block behind it."""
        return self._pass.cache_bytes(positions + self.block) if self._caches else 0

    @property
    def kv_allocated(self) -> int:
        """Return the bytes that the next text reuses."""
        return self._pass.reserved_bytes

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Allocate that memory when the first token is computed, and no more later."""
        self._room = positions + self.block

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Append tokens; the next ``draft`` reads them, or a prompt's part is read at once."""
        self._append(observation.tokens)
        if observation.remaining and self._caches and self._fits(0):
            self._read(torch.cat(self._text), 0)
            self._text = []

    def _append(self, tokens: Tensor) -> None:
        self._text.append(tokens)
        self._known += tokens.shape[0]

    def _fits(self, more: int) -> bool:
        """Return whether the model has positions for the text and so many tokens behind it."""
        return self.model.first + self._known + more <= self.model.max_positions

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Predict the block behind the newest token, ``[1, n, V]``, and nothing below it."""
        words = self.draft_vocabulary
        begun, self._begun = self._begun, None
        rows = self._count(begun) if not frontier.tokens.shape[1] else 0
        if not rows:
            return DraftOutput.nothing(frontier, self.host.vocab_size, words)
        text = torch.cat(self._text)
        self._text = [text]
        shown = torch.full((rows,), MASK, device=text.device)
        logits = self._denoised(text, shown)
        if self._caches:
            text = text[-1:]  # all but the root is in the cache
            self._text = [text]
        steps = min(self.config.steps, rows)
        for step in range(1, steps):
            self._fix(logits, shown, rows * step // steps, begun)
            logits = self._with_fixed(self._denoised(text, shown), shown)
        return DraftOutput(logits[None], all_proposed=steps == 1, vocabulary=words)

    def _count(self, begun: RoundContext | None) -> int:
        """Return the rows of a draft: the block, within the round's budget and the positions."""
        depth = None if begun is None else begun.budget.depth
        most = self.block if depth is None else min(self.block, depth)
        left = self.model.max_positions - self.model.first - self._known + self._ahead
        return max(0, min(most, left))

    def _denoised(self, text: Tensor, shown: Tensor) -> Tensor:
        """Make a pass over the text and what stands behind it; the block's logits, ``[k, V]``.

        Args:
            text: ``[n]``, what is not in the cache, or all; the root last.
            shown: ``[k]`` long, the tokens of the block, or ``MASK``.
        """
        behind = shown[: len(shown) - self._ahead]
        if not self._caches:
            return self._read_whole(text, behind)
        logits = self._read(torch.cat((text, behind)), len(behind))
        assert self._cache is not None
        self._cache.truncate(self._cache.length - len(behind) - 1)  # the root is read again
        return logits[-len(shown) :]

    def _read(self, tokens: Tensor, masks: int) -> Tensor:
        """Append tokens to the cache, the last of them masks that see all; their last logits."""
        new = len(tokens)
        if self._cache is None:
            room = max(self._room, new)
            self._cache = self._pass.new_cache(room, self.model.max_positions + self.block)
        start = self._cache.length
        self._pass.reserve(self._cache, start + new)
        first = self.model.first + start
        positions = torch.arange(first, first + new, device=tokens.device)
        mask = causal_mask(new, 0, tokens.device)[0]
        mask[new - masks :] = True
        if new <= FEW:
            return self._pass([tokens], NewPositions(positions, mask, self._cache))[1]
        states = self.model(tokens[None], positions[None], mask[None], self._cache)
        return self.model.logits(states[0, -masks - 1 :])

    def _read_whole(self, text: Tensor, behind: Tensor) -> Tensor:
        """Read the whole text again, with what stands behind it; the logits of its block."""
        tokens = torch.cat((text, behind))
        positions = torch.arange(len(tokens), device=tokens.device) + self.model.first
        mask = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool, device=tokens.device)
        states = self.model(tokens[None], positions[None], mask)[0]
        return self.model.logits(states[-len(behind) - self._ahead :])

    def _fix(self, logits: Tensor, shown: Tensor, count: int, begun: RoundContext | None) -> None:
        """Draw the tokens that are still hidden, and show the surest until ``count`` are."""
        hidden = (shown < 0).nonzero().flatten()
        rows = logits[hidden].float()
        if begun is None or begun.sampling.greedy:
            columns = rows.argmax(-1)
        else:
            columns = begun.sampling.draw(rows, begun.generator)
        sure = rows.log_softmax(-1).gather(1, columns[:, None])[:, 0]
        best = sure.topk(count - len(shown) + len(hidden)).indices
        words = self.draft_vocabulary
        tokens = columns if words is None else words.tokens(columns)
        shown[hidden[best]] = tokens[best]

    def _with_fixed(self, logits: Tensor, shown: Tensor) -> Tensor:
        """Return rows in which a token that was fixed has all the mass."""
        words = self.draft_vocabulary
        columns = shown if words is None else words.columns(shown)
        fixed = shown >= 0
        certain = torch.full_like(logits, -torch.inf)
        certain.scatter_(1, columns.clamp_min(0)[:, None], 0.0)
        return torch.where(fixed[:, None], certain, logits)

    # --- compiled passes ----------------------------------------------------------------------

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """Return the same drafter, drafting through compiled passes if it has a cache."""
        if not self._caches:
            announce("drafter diffusion is not compiled: attention is bidirectional")
            return self
        return super().compiled(announce, compiler, recorder)

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """Return the one pass."""
        return (self._pass,)
