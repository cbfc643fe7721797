"""Block drafters whose logits are corrected by the tokens that were drafted before: DSpark, Domino.

The first pass of a round drafts a block as DFlash's does, each place of it blind to the others.
What it says of the j-th token below the root then gets a correction by the tokens on the path to
that token. So every place is a pass of the round, of which all but the first are small, and every
branch of a tree is corrected by its own tokens.

Shapes: B batch, T tokens, A anchors, k block, F frontier blocks, R rank of the correction, S state,
C channels that the correction reads, H hidden, V vocabulary (the draft vocabulary, where there
is one).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
)
from falcon_lab_dflash import DFlashConfig, DominoConfig, DSparkConfig
from falcon_lab_dflash.anchors import draw_anchors
from falcon_lab_dflash.drafter import DFlashDrafter


class CorrectedDrafter(DFlashDrafter):
    """A block drafter, and what corrects it.

    Attributes:
        block: 1.
        max_passes: k.
    """

    def __init__(self, config: DFlashConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.block, self.max_passes = 1, self.length
        self._said: tuple[Tensor, Tensor] | None = None  # [k, V] and [k, H], of the round's block
        self._state: Tensor | None = None  # [F, S], of the newest pass's nodes
        self._depth = 0

    @property
    def words(self) -> Any:
        """Return what has the LM head: the draft vocabulary, or the target."""
        return self.draft_vocabulary or self.host

    @abstractmethod
    def read(
        self, features: Tensor, tokens: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the correction reads, ``[..., C]``, and the state of the path.

        Args:
            features: ``[..., H]``, what the block's pass says of the next token.
            tokens: ``[...]`` long, the newest of the path.
            state: ``[..., S]`` of the path before it; None at the root, or where there is none.
        """

    @abstractmethod
    def correction(self, rows: Tensor) -> Tensor:
        """Return what is added to the logits: ``[..., C]`` -> ``[..., V]``."""

    # --- training -----------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict the first place of blocks; the others are those of ``unroll``'s later passes.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        return next(self.unroll(inputs, reveal))

    def unroll(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Iterator[Prediction]:
        """Yield the places of blocks at random anchors, each corrected by the true tokens before.

        Raises:
            FalconLabError: as ``forward``.
        """
        if reveal is not None:
            raise FalconLabError(
                f"{type(self).__name__} reads the tokens of a block before the one that it "
                "predicts, in place of what a schedule would reveal; set glancing.name=none"
            )
        anchors = draw_anchors(inputs.documents, self._anchors, inputs.generator)
        found = self.predict(inputs, anchors).features
        assert found is not None
        blocks, state = found.view(*anchors.shape, self.length, -1), None
        last = inputs.tokens.shape[1] - 1
        for place in range(self.length):
            features = blocks[:, :, place]
            before = inputs.tokens.gather(1, (anchors + place).clamp_max(last))
            rows, state = self.read(features, before, state)
            yield Prediction(
                features=features,
                logits=None,
                label=anchors + 1 + place,
                source=anchors,
                slot=torch.zeros_like(anchors),
                group=torch.arange(anchors.shape[1], device=anchors.device).expand_as(anchors),
                head=lambda some, _: self._logits(some),
                hidden=rows,
            )

    def _logits(self, rows: Tensor) -> Tensor:
        """Return the corrected logits of ``[n, C]`` rows, which begin with the block's output."""
        said: Tensor = self.words.head(rows[:, : self.host.hidden_size].to(self.host.dtype))
        return said + self.correction(rows)

    # --- drafting -----------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        super().reset(first)
        self._said = None

    def observe(self, observation: Observation) -> None:
        """Take new positions in; what the round's block said is over."""
        super().observe(observation)
        self._said = None

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return ``[F, 1, V]`` for the root or F nodes, and nothing below the block."""
        if frontier.tokens.shape[1] == 0:
            block = super().draft(frontier)
            assert block.features is not None
            assert self._root is not None
            self._said = block.logits[0], block.features[0]
            self._depth, state, tokens = 0, None, self._root.reshape(1)
        elif self._said is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        elif self._depth + 1 == self.length:
            return super().draft(frontier)
        else:
            self._depth += 1
            state = None if self._state is None else self._state[frontier.parents]
            tokens = frontier.tokens[:, 0]
        logits, features = (of[self._depth].expand(len(tokens), -1) for of in self._said)
        rows, self._state = self.read(features, tokens, state)
        corrected = logits + self.correction(rows).to(logits.dtype)
        words = self.draft_vocabulary
        return DraftOutput(corrected[:, None], all_proposed=True, vocabulary=words)


class DSparkDrafter(CorrectedDrafter):
    """Correct by the token before alone: a table of pairs of tokens of low rank (Markov head)."""

    def __init__(self, config: DSparkConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.before = nn.Embedding(self.host.vocab_size, config.rank)
        self.after = nn.Linear(config.rank, self.words.vocab_size, bias=False)
        nn.init.normal_(self.before.weight, std=0.02)  # so that it begins nearly as DFlash

    def read(
        self, features: Tensor, tokens: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the block's output beside what stands for the token before, ``[..., H + R]``."""
        known = self.before(tokens)
        return torch.cat([features.to(known.dtype), known], dim=-1), None

    def correction(self, rows: Tensor) -> Tensor:
        """Map what stands for the token before to a bias of every token."""
        bias: Tensor = self.after(rows[..., self.host.hidden_size :])
        return bias


class DominoDrafter(CorrectedDrafter):
    """Correct by all tokens of the path, in a recurrent state, and by the block's output."""

    def __init__(self, config: DominoConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        width = self.host.hidden_size
        self.path = nn.GRUCell(width, config.state, bias=False)
        self.down = nn.Linear(width + config.state, config.rank, bias=False)
        self.up = nn.Linear(config.rank, self.words.vocab_size, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)  # so that it begins nearly as DFlash

    def read(
        self, features: Tensor, tokens: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the block's output beside the state after the newest token, ``[..., H + S]``."""
        embedded = self.host.embed(tokens).to(self.down.weight.dtype)
        before = None if state is None else state.flatten(0, -2)
        after: Tensor = self.path(embedded.flatten(0, -2), before)
        after = after.view(*tokens.shape, -1)
        return torch.cat([features.to(after.dtype), after], dim=-1), after

    def correction(self, rows: Tensor) -> Tensor:
        """Map both through the low rank to a bias of every token."""
        bias: Tensor = self.up(functional.silu(self.down(rows)))
        return bias
