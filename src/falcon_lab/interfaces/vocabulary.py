"""The draft vocabulary: the tokens that a drafter may propose, where these are not all.

An LM head costs a drafter pass as much as its other layers or more, and most of its rows are of
tokens that hardly ever occur. So a drafter may train and draft over the n most frequent ones
(FR-Spec, arXiv 2502.14856; ``d2t`` and ``t2d`` of EAGLE-3's official code). Column c of its logits
is then about the target's token ``ids[c]``. Whatever is verified, accepted or committed is a token
of the target: columns become tokens where a pass's logits become candidates, and nowhere later.

Shapes: n draft vocabulary, V target's vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError

OUTSIDE = -100
"""Column of a token that is not in the draft vocabulary: what losses take for a missing label."""


class HeadHost(Protocol):
    """What a draft vocabulary asks of the target: part of ``DrafterHost``."""

    vocab_size: int
    eos_ids: frozenset[int]
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """As ``DrafterHost`` has it."""
        ...

    def narrow_head(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """As ``DrafterHost`` has it."""
        ...

    def copy_head(self, tokens: Tensor | None = None) -> nn.Module:
        """As ``DrafterHost`` has it."""
        ...


class DraftVocabulary(nn.Module):
    """Some tokens of the target, and the rows of its LM head for them.

    It has ``head``, ``copy_head`` and ``vocab_size`` as the target has them, for those tokens
    alone. The rows are the target's own, copied once so that they lie together; they are neither
    trained nor saved, and follow the module to any device in the target's precision.

    Attributes:
        ids: ``[n]`` long, ascending: the target's token of each column. They are saved with the
            drafter. (EAGLE-3's ``d2t`` is ``ids - arange(n)``, its ``t2d`` whether a token has a
            column.)
        rows: of the target's LM head, where they were needed so far.

    Args:
        host: the target.
        size: n, less than V.
        counts: ``[V]``, how often each token occurs in the answers of the training; None where
            that is not known, as where a saved drafter is about to be loaded.
        own_head: the drafter has an LM head of its own, so that only its training needs the
            target's rows.

    Raises:
        ValueError: the special tokens and those that end a text alone are more than n.
        FalconLabError: rows of the target's LM head cannot be copied.
    """

    ids: Tensor
    _column: Tensor  # [V] long

    def __init__(
        self,
        host: HeadHost,
        size: int,
        counts: Tensor | None = None,
        *,
        own_head: bool = False,
    ) -> None:
        super().__init__()
        self._host = host
        self.register_buffer("ids", most_frequent(host, size, counts).to(host.device))
        self.rows = None if own_head else host.narrow_head(self.ids)
        self._number_columns()
        self.register_load_state_dict_post_hook(_renew_loaded)

    @property
    def vocab_size(self) -> int:
        """Return n."""
        return self.ids.shape[0]

    def head(self, features: Tensor) -> Tensor:
        """Apply the rows of the target's LM head: ``[..., H]`` -> ``[..., n]``."""
        if self.rows is None:
            self.rows = self._host.narrow_head(self.ids)
        return self.rows(features)

    def copy_head(self) -> nn.Module:
        """Make a head of these rows that begins as the target's, in float32, and is trained."""
        return self._host.copy_head(self.ids)

    def tokens(self, columns: Tensor) -> Tensor:
        """Return the target's tokens of columns, ``[...]`` long."""
        return self.ids[columns]

    def columns(self, tokens: Tensor) -> Tensor:
        """Return the columns of the target's tokens, ``[...]`` long.

        ``OUTSIDE`` stands for those that have none, and for ``OUTSIDE`` itself.
        """
        return self._column[tokens.clamp_min(0)].where(tokens >= 0, OUTSIDE)

    def spread(self, values: Tensor, outside: float) -> Tensor:
        """Spread ``[..., n]`` over the target's vocabulary: ``[..., V]``, ``outside`` elsewhere."""
        shape = *values.shape[:-1], self._host.vocab_size
        return values.new_full(shape, outside).index_copy_(-1, self.ids, values)

    def check(self) -> None:
        """See that these are tokens of the target.

        Raises:
            FalconLabError: one is not, or they are not in order.
        """
        known, there = self._host.vocab_size, self.ids
        if int(there[0]) < 0 or int(there[-1]) >= known:
            wrong = int(there[0]) if int(there[0]) < 0 else int(there[-1])
            raise FalconLabError(
                f"its draft vocabulary has token {wrong}, and the target has the tokens 0 to "
                f"{known - 1}; use the target that it was trained for"
            )
        if not bool((there[1:] > there[:-1]).all()):
            raise FalconLabError(
                "the tokens of its draft vocabulary are not in ascending order, so that the file "
                "is damaged; copy it again"
            )

    def renew(self) -> None:
        """Copy the rows anew, and number the columns, after ``ids`` were changed or moved."""
        if self.rows is not None:
            self.rows = self._host.narrow_head(self.ids)
        self._number_columns()

    def _number_columns(self) -> None:
        column = torch.full((self._host.vocab_size,), OUTSIDE, device=self.ids.device)
        column[self.ids] = torch.arange(self.vocab_size, device=self.ids.device)
        self.register_buffer("_column", column, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DraftVocabulary:
        super()._apply(fn, recurse)
        self.renew()  # in the target's precision, whatever that of the drafter becomes
        return self


def _renew_loaded(vocabulary: nn.Module, _: Any) -> None:
    assert isinstance(vocabulary, DraftVocabulary)
    vocabulary.check()
    vocabulary.renew()


def most_frequent(host: HeadHost, size: int, counts: Tensor | None) -> Tensor:
    """Choose a draft vocabulary: ``[size]`` long, ascending.

    Special tokens and those that end a text are always in it; of tokens that are equally frequent,
    or do not occur at all, those of the lowest numbers.

    Args:
        host: the target.
        size: n.
        counts: as in ``DraftVocabulary``.

    Raises:
        ValueError: there is no room for the tokens that are always in it.
    """
    always = always_kept(host)
    if size < len(always):
        raise ValueError(
            f"draft_vocabulary is {size}, and the target has {len(always)} special tokens, which "
            f"are always in it; make it {len(always) + 1} or more, or null for all tokens"
        )
    rank = torch.zeros(host.vocab_size, dtype=torch.long)
    if counts is not None:
        there = min(host.vocab_size, len(counts))
        rank[:there] = counts[:there].cpu().long()
    rank[always] = rank.max() + 1
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def always_kept(host: HeadHost) -> list[int]:
    """Return the special tokens that the target has a row for."""
    return sorted(number for number in special_tokens(host) if number < host.vocab_size)


def special_tokens(host: HeadHost) -> frozenset[int]:
    """Return the tokens that end a text, and those that the tokenizer calls special."""
    tokenizer = host.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {*host.eos_ids, *getattr(tokenizer, "all_special_ids", ())}
    found |= {number for number, token in added.items() if getattr(token, "special", False)}
    return frozenset(found)
