"""When the keys and values of committed tokens are made precise: EasySpec's calibration.

What goes through groups of layers leaves fuzzy keys and values behind. Calibration drops those of
accepted tokens and reads the tokens again, together with the bonus token, through one layer after
the other: a pass that has to be made anyway, which gives precise keys and the first draft logits.

Shapes: n tokens, L committed tokens.
"""

from __future__ import annotations

import torch
from falcon_lab_sps.drafting import Drafting, Way
from falcon_lab_sps.small_model import SmallModel
from torch import Tensor

from falcon_lab.interfaces import Frontier


class CalibratedDrafting(Drafting):
    """One text that a draft model drafts for by groups of layers.

    The cache holds precise keys and values up to a point and fuzzy ones behind it, so that a
    calibration reads again all that is fuzzy.

    Args:
        model: what drafts.
        precise: through one layer after the other.
        fuzzy: through groups of layers.
        first: position of the first token, 0 or 1.
        when: one of ``CALIBRATIONS``.
    """

    def __init__(self, model: SmallModel, precise: Way, fuzzy: Way, first: int, when: str) -> None:
        super().__init__(model, precise, fuzzy, first)
        self._precise, self._when = precise, when
        self._fuzzy: list[Tensor] = []  # committed tokens behind the precise ones
        self._in_prompt = True
        self._passes = 0  # of the round
        self._mismatch = False  # in the latest round

    def observe(self, tokens: Tensor, remaining: int) -> None:
        """Note whether a draft token was refused: every pass goes one token deeper."""
        self._mismatch = len(tokens) <= self._passes
        self._passes = 0
        super().observe(tokens, remaining)

    def root(self) -> Tensor | None:
        """Return logits after the newest token, ``[1, 1, V]``, or None."""
        found = super().root()
        self._in_prompt = False
        self._passes += 1
        return found

    def blocks(self, frontier: Frontier) -> Tensor | None:
        """Return logits after F nodes, ``[F, 1, V]``, or None."""
        self._passes += 1
        return super().blocks(frontier)

    def _unread(self) -> tuple[Tensor, Way]:
        tokens, _ = super()._unread()
        if not self._is_due():
            self._fuzzy.append(tokens)
            return tokens, self._expanded
        again = torch.cat([*self._fuzzy, tokens])
        self._length -= len(again) - len(tokens)
        self._fuzzy = []
        return again, self._precise

    def _is_due(self) -> bool:
        """Return whether what is read now is to be precise, and what is fuzzy read again."""
        if self._in_prompt:
            return self._when != "never"
        return self._when == "every_round" or (self._when == "every_mismatch" and self._mismatch)
