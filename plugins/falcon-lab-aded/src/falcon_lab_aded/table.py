"""The table of tri-grams: a file that is mapped into memory, and never read whole.

It is a safetensors file. Contexts stand in ascending order, so that one is found by bisection in a
few pages of it, and its successors lie together.

Shapes: C contexts, E successors of all contexts, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, write_whole
from falcon_lab_aded.successors import NONE, Successors

Integers = NDArray[np.int64]

KIND = "falcon-lab-aded trigrams"
"""What the file says that it is."""
SHAPES = {"contexts": "I64", "begins": "I64", "totals": "I64", "tokens": "I32", "counts": "I32"}
"""Its arrays, and their types."""
REMEMBERED = 2**14
"""Contexts whose successors are kept ready."""
MOST_VOCABULARY = 2**21
"""Of which three tokens make a number of 63 bits."""


class TrigramTable:
    """The successors of contexts, with how often each was seen.

    Attributes:
        facts: what the file says of itself: vocabulary, tokenizer, corpus and counts.

    Args:
        arrays: ``contexts`` ``[C]``, ascending; ``begins`` ``[C + 1]``, where each one's successors
            begin; ``totals`` ``[C]``, how often each was seen; ``tokens`` and ``counts`` ``[E]``.
        facts: see above.
    """

    def __init__(self, arrays: Mapping[str, Any], facts: Mapping[str, str]) -> None:
        self.facts = dict(facts)
        self._arrays = arrays
        self._contexts, self._begins = arrays["contexts"], arrays["begins"]
        self._remembered: dict[int, Successors] = {}

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file into memory.

        Raises:
            FalconLabError: it cannot be read, or is no such file.
        """
        with about(path, "read"):
            path.open("rb").close()
        try:
            # What numpy is given is copied; a tensor is a view of the mapped file.
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                names = file.keys()
                found = {name: file.get_slice(name).get_dtype() for name in names}
                if facts.get("kind") != KIND or found != SHAPES:
                    raise _no_table(path, "it holds something else")
                arrays = {name: file.get_tensor(name).numpy() for name in SHAPES}
        except SafetensorError as error:
            raise _no_table(path, str(error)) from error
        count, successors = len(arrays["contexts"]), len(arrays["tokens"])
        lengths = [len(arrays[name]) for name in ("begins", "totals", "counts")]
        if lengths != [count + 1, count, successors] or int(arrays["begins"][-1]) != successors:
            raise _no_table(path, "its arrays do not fit each other")
        return cls(arrays, facts)

    def save(self, path: Path) -> None:
        """Write the table, whole or not at all.

        Raises:
            FalconLabError: it cannot be written.
        """
        arrays = {name: self._arrays[name] for name in SHAPES}
        facts = {**self.facts, "kind": KIND}
        write_whole(path, lambda place: save_file(arrays, place, facts), also=(SafetensorError,))

    def __call__(self, context: int) -> Successors:
        """Return what may follow a context, the most frequent first."""
        found = self._remembered.get(context)
        if found is None:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            found = self._remembered[context] = self._look_up(context)
        return found

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing of it changes, and copies of a drafter share it

    def __len__(self) -> int:
        return len(self._contexts)

    def _look_up(self, context: int) -> Successors:
        place = int(self._contexts.searchsorted(context))
        if place == len(self._contexts) or self._contexts[place] != context:
            return NONE
        begin, end = self._begins[place : place + 2].tolist()
        shares = self._arrays["counts"][begin:end] / self._arrays["totals"][place]
        return Successors.of(self._arrays["tokens"][begin:end].tolist(), shares.tolist())

    def check_tokenizer(self, tokenizer: Any, vocabulary: int) -> None:
        """Refuse a target whose tokens are others.

        Args:
            tokenizer: the target's.
            vocabulary: V of the target.

        Raises:
            FalconLabError: they are.
        """
        own = str(vocabulary), tokenizer_digest(tokenizer)
        if (self.facts.get("vocabulary"), self.facts.get("tokenizer")) != own:
            raise FalconLabError(
                f"the table of {self.facts.get('corpus', 'some corpus')} was counted with another "
                "tokenizer than the target's; build it again with the target's "
                "(python -m falcon_lab_aded build)"
            )


def _no_table(path: Path, reason: str) -> FalconLabError:
    return FalconLabError(
        f"{path}: no table of tri-grams, {reason}; python -m falcon_lab_aded build writes one"
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """Return sixteen hex digits that change with the tokens of a tokenizer."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def pruned(trigrams: Integers, counts: Integers, vocabulary: int, most: int) -> dict[str, Any]:
    """Return the arrays of a table with the most frequent successors of every context.

    Of equally frequent ones those with the lower numbers stay.

    Args:
        trigrams: tri-grams that were seen, each once, as (a·V + b)·V + c.
        counts: how often.
        vocabulary: V.
        most: successors of a context.
    """
    contexts, tokens = trigrams // vocabulary, trigrams % vocabulary
    order = np.lexsort((tokens, -counts, contexts))
    contexts, tokens, counts = contexts[order], tokens[order], counts[order]
    unique, first, sizes = np.unique(contexts, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(first) else counts
    kept = np.arange(len(contexts)) - np.repeat(first, sizes) < most
    begins = np.concatenate(([0], np.minimum(sizes, most).cumsum()))
    return {
        "contexts": unique,
        "begins": begins.astype(np.int64),
        "totals": totals,
        "tokens": tokens[kept].astype(np.int32),
        "counts": counts[kept].clip(max=2**31 - 1).astype(np.int32),
    }
