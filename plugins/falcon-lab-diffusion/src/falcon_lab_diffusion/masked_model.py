"""The masked language model: the target's first layers, or a pretrained one.

Shapes: B batch, T tokens, n tokens of a pass, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterHost, DraftVocabulary, Outputs
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.families import max_positions
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.passes import Inputs, NewPositions, NewTokens
from falcon_lab_diffusion import DiffusionConfig

MASK = -1
"""Stands for the mask among tokens."""


class MaskedModel(nn.Module):
    """Wrap decoder layers that read tokens and masks.

    Attributes:
        backbone: the layers.
        max_positions: positions that they were made for.
        first: position of the first token that it reads of a text.
    """

    backbone: Backbone
    max_positions: int
    first: int

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None = None
    ) -> Tensor:
        """Return the hidden states ``[B, T, H]`` of tokens and masks ``[B, T]``."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn ``[..., H]`` into ``[..., V]``."""
        raise NotImplementedError


class FirstLayers(MaskedModel):
    """The target's first layers and the norm behind its last, with its embeddings and LM head.

    The mask is one more embedding, which begins as that of a reserved token of the tokenizer, or as
    the mean of all.

    Args:
        config: how many layers.
        host: the target.
        words: the tokens that it gives logits of; None: all.

    Raises:
        ValueError: the target has too few layers.
    """

    first = 1  # the first token of a text makes no row of training

    def __init__(
        self, config: DiffusionConfig, host: Any, words: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        count = host.config.num_hidden_layers
        layers = config.layers or max(1, count // 4)
        if layers > count:
            raise ValueError(f"layers is {layers}, and the target has {count}")
        self.backbone = Backbone.short(host.config, layers)
        begin_as(self.backbone.base, host.backbone.base)
        self._target = (host, words)
        self.max_positions = host.max_positions
        self.mask = nn.Parameter(first_mask(host))

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None = None
    ) -> Tensor:
        """Return the hidden states of tokens and masks."""
        known = self._target[0].embed(tokens.clamp_min(0)).to(self.mask.dtype)
        rows = known.where((tokens >= 0).unsqueeze(-1), self.mask)
        hidden: Tensor = self.backbone(embeddings=rows, positions=positions, mask=mask, cache=cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's logits, or those of the draft vocabulary."""
        host, words = self._target
        found: Tensor = (words or host).head(hidden.to(host.dtype))
        return found


class Pretrained(MaskedModel):
    """A masked diffusion model with a head of its own, that began as a causal model.

    Args:
        config: which model.
        host: the target.

    Raises:
        FalconLabError: it cannot be loaded, has another vocabulary, or no mask.
    """

    first = 0

    def __init__(self, config: DiffusionConfig, host: DrafterHost) -> None:
        super().__init__()
        from falcon_lab_sps import SpsConfig
        from falcon_lab_sps.small_model import small_model

        self.whole = small_model(SpsConfig(model=config.model, revision=config.revision), host)
        self.backbone = self.whole.backbone
        self.max_positions = max_positions(self.whole.config)
        self._mask = self._mask_of(config, host)

    def _mask_of(self, config: DiffusionConfig, host: DrafterHost) -> int:
        known = host.tokenizer.get_vocab()
        if config.mask_token is not None:
            if config.mask_token in known:
                return int(known[config.mask_token])
            raise FalconLabError(
                f"drafter.mask_token: {config.mask_token!r} is not in the vocabulary"
            )
        for found in (
            getattr(self.whole.config, "mask_token_id", None),
            getattr(host.tokenizer, "mask_token_id", None),
        ):
            if found is not None:
                return int(found)
        raise FalconLabError(
            f"{config.model} does not say which token is its mask; name it in drafter.mask_token"
        )

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache | None = None
    ) -> Tensor:
        """Return the hidden states of tokens and masks."""
        named = tokens.where(tokens >= 0, self._mask)
        hidden: Tensor = self.whole(tokens=named, positions=positions, mask=mask, cache=cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return its own logits."""
        return self.whole.logits(hidden)


class MaskedForward(NewTokens):
    """A pass from ``[n]`` tokens and masks to hidden states ``[n, H]`` and logits ``[n, V]``.

    Args:
        model: what is run.
    """

    def __init__(self, model: MaskedModel) -> None:
        super().__init__(model.backbone, "drafter")
        self.model = model

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Read ``[n]`` tokens."""
        assert new is not None
        positions, mask, cache = new
        wide = None if mask is None else mask[None]
        hidden = self.model(inputs[0][None], positions[None], wide, cache)[0]
        return hidden, self.model.logits(hidden)


def begin_as(base: nn.Module, target: nn.Module) -> None:
    """Give a model the weights of another one that have the same names and shapes."""
    theirs = target.state_dict()
    same = {
        name: theirs[name]
        for name, weight in base.state_dict().items()
        if name in theirs and theirs[name].shape == weight.shape
    }
    base.load_state_dict(same, strict=False)


RESERVED = ("<|mask|>", "[MASK]", "<mask>", "<|reserved_special_token_0|>", "<reserved_0>")
"""Names of tokens that no text has."""


@torch.no_grad()
def first_mask(host: Any) -> Tensor:
    """Return ``[H]`` float32: the embedding of a reserved token, or the mean of all tokens'."""
    vocabulary = host.tokenizer.get_vocab() if host.tokenizer is not None else {}
    found = getattr(host.tokenizer, "mask_token_id", None)
    for name in RESERVED:
        found = vocabulary.get(name) if found is None else found
    if found is not None:
        reserved: Tensor = host.embed(torch.tensor(found, device=host.device))
        return reserved.detach().float().clone()
    total, size = 0.0, 4096
    for start in range(0, host.vocab_size, size):
        part = torch.arange(start, min(start + size, host.vocab_size), device=host.device)
        total = total + host.embed(part).float().sum(0)
    mean: Tensor = torch.as_tensor(total) / host.vocab_size
    return mean.detach().clone()
