"""The target of a server, as far as a drafter may use it: its tables, and what describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import LayerPlan
from falcon_lab.model.families import max_positions
from falcon_lab.model.lm_head import HeadCopy, LMHead, NarrowHead
from falcon_lab.model.target import end_tokens

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Families that read their embeddings as they are, and whose LM head is a product alone."""


class ServedTarget:
    """A ``DrafterHost`` made of a server's own weights, which are shared and not copied.

    Attributes:
        name: of the target, for messages.

    Args:
        name: of the target.
        embeddings: ``[V or more, H]``; servers pad the vocabulary.
        head: of the LM head, as ``embeddings``.
        config: the Hugging Face configuration.
        tokenizer: of the target.

    Raises:
        FalconLabError: the family does more than its tables tell.
    """

    def __init__(
        self, name: str, embeddings: Tensor, head: Tensor, config: Any, tokenizer: Any
    ) -> None:
        self.name = name
        self.config = config.get_text_config(decoder=True)
        if self.config.model_type not in PLAIN:
            raise FalconLabError(
                f"{name} is of the family {self.config.model_type}, and drafters are served for "
                f"{', '.join(PLAIN)} alone, whose embeddings and LM head are plain tables"
            )
        self.tokenizer = tokenizer
        self.vocab_size = int(self.config.vocab_size)
        self.hidden_size = int(self.config.hidden_size)
        self.max_positions = max_positions(self.config)
        self.eos_ids = end_tokens(self, tokenizer)
        self._embeddings = embeddings.detach()[: self.vocab_size]
        linear = nn.Linear(self.hidden_size, self.vocab_size, bias=False, device="meta")
        linear.weight = nn.Parameter(head.detach()[: self.vocab_size], requires_grad=False)
        self._head = LMHead(linear, self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self._embeddings.dtype

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self._embeddings.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: ``[...]`` long -> ``[..., H]``."""
        return self._embeddings[tokens]

    def head(self, features: Tensor) -> Tensor:
        """Apply the LM head: ``[..., H]`` -> ``[..., V]``."""
        return self._head.forward(features)

    def narrow_head(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the LM head's rows of some tokens: ``[..., H]`` -> ``[..., n]``."""
        return NarrowHead(self._head.linear, self.config, tokens)

    def copy_head(self, tokens: Tensor | None = None) -> nn.Module:
        """Return a head that begins as the target's own."""
        return HeadCopy(self._head.linear, self.config, tokens)

    def norm(self, states: Tensor) -> NoReturn:
        """Refuse: the layers are the server's.

        Raises:
            FalconLabError: always.
        """
        raise _no_layers()

    def pass_cost(self, plan: LayerPlan) -> NoReturn:
        """Refuse as ``norm`` does.

        Raises:
            FalconLabError: always.
        """
        raise _no_layers()

    def run_upper(self, layer: int, states: Tensor, positions: Tensor, mask: Tensor) -> NoReturn:
        """Refuse as ``norm`` does.

        Raises:
            FalconLabError: always.
        """
        raise _no_layers()


def _no_layers() -> FalconLabError:
    return FalconLabError(
        "the drafter runs layers of the target, which a server does not lend; serve one that reads "
        "features or tokens alone"
    )
