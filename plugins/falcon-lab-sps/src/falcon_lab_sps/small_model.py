"""The draft model: a fresh one of the target's kind, or a pretrained one.

Shapes: B batch, T new tokens, H hidden (of the small model), V vocabulary (of the target).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.config.schema import TargetConfig, dtype_name
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterHost
from falcon_lab.model.backbone import Backbone, fresh_attention, of_the_kind, plain_attention
from falcon_lab.model.families import LayerSizes, decoder_of, max_positions, short_config
from falcon_lab.model.lm_head import HeadCopy, final_logits
from falcon_lab.model.loading import load_target
from falcon_lab.model.memory import check_room
from falcon_lab_sps import LAYERS, SpsConfig

NEVER = -1e4
"""Logit of a token that the draft model does not have: finite in half precision, and in a loss."""

GROUPS = ("num_key_value_heads", "num_kv_heads")
"""Names of the number of heads of keys and values, by family."""

WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "dff", "moe_intermediate_size")
"""Names of the width of feed-forward layers, by family."""


class SmallModel(nn.Module):
    """Wrap a causal language model, with logits as wide as the target's.

    Attributes:
        backbone: all of it but the LM head.
        config: its (text) configuration.
        max_positions: positions that it was made for.

    Args:
        model: a Hugging Face model with an LM head.
        vocabulary: V.
        words: ``[n]`` long, the tokens that it gives logits of, by an LM head of its own which
            begins as the model's; None: all.
    """

    def __init__(self, model: Any, vocabulary: int, words: Tensor | None = None) -> None:
        super().__init__()
        self.config: Any = model.config.get_text_config(decoder=True)
        self.backbone = Backbone(decoder_of(model), lean=True)
        self.max_positions = max_positions(self.config)
        self._vocabulary = vocabulary
        head, table = model.get_output_embeddings(), self._table
        self._width = vocabulary if words is None else len(words)
        self.head: nn.Module | None
        if words is not None:
            self.head = HeadCopy(head, self.config, words).linear
        else:  # tied weights are stored, trained and saved once
            self.head = None if head.weight is table.weight else head

    @property
    def _table(self) -> Any:
        return self.backbone.base.get_input_embeddings()

    def forward(self, **arguments: Any) -> Tensor:
        """Return the hidden states of ``tokens`` ``[B, T]``; see ``Backbone.forward`` for the rest.

        A token that only the target knows is read as the last one of the table.
        """
        hidden: Tensor = self.backbone(**{**arguments, "tokens": self.known(arguments["tokens"])})
        return hidden

    def known(self, tokens: Tensor) -> Tensor:
        """Replace tokens, ``[...]`` long, that the table does not have by its last one."""
        entries = self._table.weight.shape[0]
        return tokens.clamp_max(entries - 1) if entries < self._vocabulary else tokens

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn ``[..., H]`` into ``[..., V]``, padded with ``NEVER``, or into ``[..., n]``.

        Models of one vocabulary have tables of several sizes, padded for the hardware.
        """
        if self.head is None:
            logits = functional.linear(hidden, self._table.weight)
        else:
            logits = self.head(hidden)
        logits = final_logits(logits, self.config)
        more = self._width - logits.shape[-1]
        return functional.pad(logits, (0, more), value=NEVER) if more else logits


def small_model(config: SpsConfig, host: DrafterHost, words: Tensor | None = None) -> SmallModel:
    """Make or load the model of a configuration.

    Args:
        config: which model.
        host: the target.
        words: ``[n]`` long, the tokens that it gives logits of; None: all.

    Raises:
        FalconLabError: it cannot be loaded, or its vocabulary is another one.
        ValueError: a fresh model cannot have that shape.
    """
    model = _fresh(config, host) if config.model is None else _loaded(config, host)
    return SmallModel(model, host.vocab_size, words)


def _fresh(config: SpsConfig, host: DrafterHost) -> Any:
    from transformers import AutoModelForCausalLM

    shape = fresh_config(config, host)
    with of_the_kind(host.config, "draft model"):
        make = partial(
            AutoModelForCausalLM.from_config,
            shape,
            attn_implementation=fresh_attention(host.config),
            dtype=torch.float32,
        )
        check_room(shape, make, "drafter.layers, hidden, heads and intermediate")
        model = make()
        Backbone(decoder_of(model)).check_layers(config.layers or LAYERS)
    return model


def fresh_config(config: SpsConfig, host: DrafterHost) -> Any:
    """Return the target's configuration with another shape.

    Raises:
        ValueError: the heads do not divide the width.
    """
    theirs = host.config
    hidden = config.hidden or host.hidden_size
    heads = config.heads or LayerSizes.of(theirs).heads
    if hidden % heads:
        raise ValueError(f"hidden is {hidden}, which {heads} heads do not divide")
    made = short_config(theirs, config.layers or LAYERS)
    made.vocab_size = host.vocab_size
    made.hidden_size, made.num_attention_heads = hidden, heads
    latent = bool(getattr(made, "kv_lora_rank", None))  # DeepSeek's: sizes apart from the width's
    for key in GROUPS:
        if theirs_of := getattr(made, key, None):
            setattr(made, key, heads if latent else math.gcd(heads, theirs_of))
    if not latent and getattr(made, "head_dim", None) and _can_be_set(made, "head_dim"):
        made.head_dim = hidden // heads
    if getattr(made, "query_pre_attn_scalar", None):  # Gemma's scale of attention scores
        made.query_pre_attn_scalar = hidden // heads
    _set_width(made, config.intermediate, hidden / host.hidden_size)
    return made


def _can_be_set(config: Any, key: str) -> bool:
    """Return whether it is a value of its own: some families compute theirs from others."""
    found = getattr(type(config), key, None)
    return not isinstance(found, property) or found.fset is not None


def _set_width(made: Any, width: int | None, proportion: float) -> None:
    name = next((name for name in WIDTHS if hasattr(made, name)), None)
    if name is None:
        if width is None:
            return  # the family computes it from others
        raise ValueError(f"{made.model_type} has no width of its own in the feed-forward layers")
    theirs = getattr(made, name)
    every_layer = isinstance(theirs, list)  # Gemma 3n lists them
    of_one = theirs[0] if every_layer else theirs
    if width is None and of_one is not None:  # without a number the family computes it
        width = max(1, round(of_one * proportion))
    setattr(made, name, [width] * made.num_hidden_layers if every_layer else width)


def _loaded(config: SpsConfig, host: DrafterHost) -> Any:
    assert config.model is not None
    wanted = TargetConfig(
        name=config.model,
        revision=config.revision,
        dtype=dtype_name(host.dtype),
        attention=plain_attention(host.config),
        device=str(host.device),
    )
    try:
        loaded = load_target(wanted)
    except FalconLabError as error:
        raise FalconLabError(f"draft model {config.model}: {error}") from error
    check_same_vocabulary(config.model, loaded.tokenizer, host.tokenizer)
    return loaded.model.requires_grad_(True)


def check_same_vocabulary(name: str, mine: Any, theirs: Any) -> None:
    """Refuse a draft model whose vocabulary is not the target's.

    Raises:
        FalconLabError: naming the first token that differs.
    """
    ours, other = mine.get_vocab(), theirs.get_vocab()
    if ours == other:
        return
    token = min({text for text, _ in ours.items() ^ other.items()})
    numbers = " and ".join(str(known.get(token, "not there")) for known in (ours, other))
    raise FalconLabError(
        f"draft model {name} has another vocabulary than the target: {len(ours)} and {len(other)} "
        f"entries; token {token!r} is {numbers}. "
        "Choose a draft model with the target's own tokenizer, or leave out model and distil one"
    )
