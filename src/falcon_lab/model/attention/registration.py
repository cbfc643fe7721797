"""Register a backend under a name that Hugging Face's modules find their attention by.

Hugging Face passes a ready-made 4-D mask to the attention function unchanged, and keywords of a
model's call as well. A mask narrower than the keys means that all tokens attend to the earlier
ones.

Shapes: as in ``backend.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from falcon_lab.model.attention.backend import widened
from falcon_lab.model.attention.merged import Merged

OURS = "falcon_lab"
"""How the names of all attention of ours start; it takes the masks of sdpa."""

PREFIX = f"{OURS}_merge"
"""How the names of backends start."""

BLOCK_SPARSE = f"{OURS}_block_sparse"
"""The name of ``block_sparse_attention``, which the fresh layers of drafters are trained with."""

OTHER_SCORES = ("softcap", "s_aux", "position_bias")
"""Keywords by which a module asks for scores that no backend of ours computes."""


@dataclass(frozen=True, slots=True)
class RegisteredAttention:
    """An attention function of Hugging Face's kind around a backend."""

    backend: Merged

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        causal: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return ``[B, N, A, D]``, and no weights.

        A mask of all keys (or none, which means a plain text there) is left to Hugging Face's own
        sdpa: packed documents, sliding windows, sequences of unequal lengths, ``generate``.

        Args:
            module: the attention module.
            query: ``[B, A, N, D]``.
            key: ``[B, G, S, D]``.
            value: ``[B, G, S, D]``.
            attention_mask: ``[B or 1, 1, N, W]`` bool, as in ``Backend``.
            dropout: of the weights.
            scaling: of the scores.
            causal: as in ``Backend``.
            others: what else the module tells its attention.
        """
        seen = key.shape[2]
        other = dropout or query.requires_grad or asks_for_other_scores(others)
        whole = attention_mask is None or (attention_mask.shape[-1] == seen and not causal)
        if other or whole:
            mask = None if attention_mask is None else widened(attention_mask, seen)
            states = module, query, key, value
            return _sdpa(*states, mask, dropout=dropout, scaling=scaling, **others)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attended = self.backend(query, key, value, attention_mask, scale=scale, causal=causal)
        return attended.transpose(1, 2).contiguous(), None


def asks_for_other_scores(keywords: Mapping[str, Any]) -> bool:
    """Return whether a module's keywords ask for scores that nothing of ours computes."""
    return any(keywords.get(name) is not None for name in OTHER_SCORES)


def register(backend: Merged) -> str:
    """The name of a backend, which transformers knows from now on."""
    # transformers treats any name with "flash" in it as its own.
    name = f"{PREFIX}_{backend.kernel.name.replace('flash', 'fa')}_{backend.least}"
    AttentionInterface.register(name, RegisteredAttention(backend))
    # Without a mask function of that name, transformers would drop the masks of ``generate``.
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    return name


def sparse_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return ``[B, N, A, D]``, and no weights: an attention function of Hugging Face's kind.

    What is no long training pass on a CPU is left to Hugging Face's own sdpa.

    Args:
        module: the attention module.
        query: ``[B, A, N, D]``.
        key: ``[B, G, S, D]``.
        value: ``[B, G, S, D]``.
        attention_mask: ``[B or 1, 1, N, S]``, or None: a plain text.
        dropout: of the weights.
        scaling: of the scores.
        others: what else the module tells its attention.
    """
    from falcon_lab.model.attention.block_sparse import block_sparse_attention, is_worthwhile

    wanted = not dropout and not asks_for_other_scores(others)
    if wanted and attention_mask is not None and is_worthwhile(query, attention_mask):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attended = block_sparse_attention(query, key, value, attention_mask, scale=scale)
        return attended.transpose(1, 2).contiguous(), None
    states = module, query, key, value, attention_mask
    return _sdpa(*states, dropout=dropout, scaling=scaling, **others)


def _sdpa(*inputs: Any, **settings: Any) -> tuple[Tensor, None]:
    """Attend as Hugging Face's own function does."""
    attended, _ = AttentionInterface()["sdpa"](*inputs, **settings)
    return attended, None


AttentionInterface.register(BLOCK_SPARSE, sparse_attention)
AttentionMaskInterface.register(BLOCK_SPARSE, AttentionMaskInterface()["sdpa"])


def backend_of(name: str) -> Merged | None:
    """The backend of a name, or None for an attention that is not ours."""
    if not name.startswith(PREFIX):
        return None
    found: RegisteredAttention = AttentionInterface()[name]
    return found.backend
