"""Prompt lookup decoding (A. Saxena, https://github.com/apoorvumang/prompt-lookup-decoding, 2023).

Shapes: F frontier blocks, k tokens copied, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, Drafter, DraftOutput, Frontier, Observation
from falcon_lab_lookup import LookupConfig


class LookupDrafter(Drafter):
    """Copy what followed the first earlier occurrence of the newest tokens.

    Runs of ``max_ngram`` newest tokens are searched for, then shorter ones; the first occurrence of
    the longest is copied from, up to k tokens, as Hugging Face's ``prompt_lookup_num_tokens`` does.
    With ``whole`` an occurrence counts only when k tokens follow it. As the first has the most text
    after it, only the first of every run need be remembered, and a draft costs ``max_ngram``
    dictionary look-ups.

    Args:
        config: the options.
        context: gives the target's vocabulary.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, config: LookupConfig, context: BuildContext) -> None:
        self.block = config.num_tokens
        self._max_ngram = config.max_ngram
        self._least = config.num_tokens if config.whole else 1
        self._vocabulary = context.host.vocab_size
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # run -> place behind its first occurrence

    def reset(self, first: Tensor) -> None:
        """Forget the text and start one with ``first``."""
        self._tokens.clear()
        self._after.clear()
        self._append(int(first))

    def observe(self, observation: Observation) -> None:
        """Read the tokens that the target has committed."""
        for token in observation.tokens.tolist():
            self._append(token)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return ``[1, n, V]``, one token a position, for the root; n is 0 without a match.

        Nothing is drafted below the root's block, with which the copy ends.
        """
        blocks, device = frontier.tokens.shape[0], frontier.tokens.device
        copied = self.lookup() if int(frontier.parents[0]) < 0 else []
        logits = torch.full((blocks, len(copied), self._vocabulary), -torch.inf, device=device)
        if copied:
            logits[0, torch.arange(len(copied)), torch.tensor(copied)] = 0.0
        return DraftOutput(logits, paths=[copied] if copied else [])

    def lookup(self) -> list[int]:
        """Return the tokens behind the first match, at most k; or none."""
        for length in range(min(self._max_ngram, len(self._tokens)), 0, -1):
            start = self._after[tuple(self._tokens[-length:])]
            if start + self._least <= len(self._tokens):
                return self._tokens[start : start + self.block]
        return []

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        end = len(self._tokens)
        for length in range(1, min(self._max_ngram, end) + 1):
            self._after.setdefault(tuple(self._tokens[end - length :]), end)
