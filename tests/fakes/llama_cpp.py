"""A module in the place of ``llama_cpp``, which computes with a model of ours."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch


class Llama:
    """What is used of ``llama_cpp.Llama``; it never ends a text by itself.

    Attributes:
        arguments: that it was made with.
        read: tokens of every prompt that it had to read.
        model: what it computes with.
        other: a token that it writes in another's place, as of other weights: at -> token.
    """

    model: Any
    other: dict[int, int]
    made: list[Llama]

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.read = arguments, list[int]()
        self._known: list[int] = []
        self.made.append(self)

    def reset(self) -> None:
        self._known = []

    def set_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**32

    def generate(self, tokens: list[int], *, temp: float, **filters: Any) -> Iterator[int]:
        assert temp == 0
        assert filters == {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        self.read.append(len(tokens) if self._known[: len(tokens)] != tokens else 0)
        text = list(tokens)
        while True:
            assert len(text) < self.arguments["n_ctx"]
            with torch.no_grad():
                best = int(self.model(torch.tensor([text])).logits[0, -1].argmax())
            text.append(self.other.get(len(text) - len(tokens), best))
            self._known = text
            yield text[-1]


def fake_llama_cpp(model: Any, other: dict[int, int] | None = None) -> Any:
    """Make the module."""
    kind = type("Llama", (Llama,), {"model": model, "other": other or {}, "made": []})
    return SimpleNamespace(Llama=kind)
