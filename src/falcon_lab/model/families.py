"""What families of models call the things of their configurations, and where they differ.

Everything that is read of a Hugging Face configuration under more than one name is read here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from falcon_lab.plugins.hooks import LayerOptions

FULL, SLIDING = "full_attention", "sliding_attention"

LINEAR_BIASES = ("bloom",)
"""Families whose positions are biases of attention (ALiBi) and have no end."""

UNBOUNDED = 2**20
"""Positions of a model whose positions have no end: so many stand for it."""

STATES = ("linear_attention", "mamba", "recurrent", "hybrid", "conv", "ssm")
"""Parts of the names of layers that carry a state from token to token."""

WITH_STATE = (
    "has a recurrent state besides keys and values ({kinds}): a tree of drafts cannot be verified "
    "through it, for a state cannot be taken back to a path; a chain could be, by keeping the "
    "state of every position, which falcon-lab does not do; choose a target whose layers are all "
    "attention"
)
"""Why a hybrid is refused."""


def decoder_of(model: Any) -> Any:
    """Return a causal language model without its LM head.

    ``get_decoder`` searches by attribute names, under which some families have other things.
    """
    from transformers import PreTrainedModel

    found = model.get_decoder()
    return found if isinstance(found, PreTrainedModel) else model.base_model


def max_positions(config: Any) -> int:
    """Return the positions that a model was made for, whatever its family calls them.

    Raises:
        FalconLabError: the configuration does not say.
    """
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(found := getattr(config, key, None), int):
            return found
    if config.model_type in LINEAR_BIASES:
        return UNBOUNDED
    raise FalconLabError(
        f"the configuration of {config.model_type} does not say how many positions it has; add "
        "max_position_embeddings to its config.json"
    )


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of attention among a model's layers.

    Raises:
        FalconLabError: for a kind that no tree mask can express.
    """
    listed = getattr(config, "layer_types", None)
    if not listed:
        listed = [SLIDING] if _slides(config) else [FULL]
    kinds = tuple(sorted(set(listed)))
    strange = sorted(set(kinds) - {FULL, SLIDING} | _older_kinds(config))
    if any(state in kind for kind in strange for state in STATES):
        raise FalconLabError(f"{config.model_type} {WITH_STATE.format(kinds=', '.join(strange))}")
    if strange:
        raise FalconLabError(
            f"{config.model_type} has layers of kind {', '.join(strange)}: a tree of "
            "drafts cannot be verified through them; choose a target whose layers are all "
            "full or sliding attention"
        )
    return kinds


def _slides(config: Any) -> bool:
    """Return whether a window holds for every layer, of a model that does not list them."""
    window: int | None = getattr(config, "sliding_window", None)
    return window is not None and 0 < window < max_positions(config)


def _older_kinds(config: Any) -> set[str]:
    """Return kinds that no mask can express, as configurations named them before."""
    blocks = getattr(config, "layers_block_type", None) or ()  # Recurrent Gemma, Jamba, Zamba
    counts_rows = "local" in (getattr(config, "attention_layers", None) or ())  # GPT-Neo
    return set(blocks) - {"attention", FULL, SLIDING} | ({"local"} if counts_rows else set())


def full_layer(config: Any) -> Any:
    """Return the configuration of a layer with full attention, where layers have sizes of their own
    (Gemma 4); else the model's."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    kinds = getattr(config, "layer_types", None) or [FULL]
    return config.per_layer_config[kinds.index(FULL) if FULL in kinds else 0]


class LayerSizes(NamedTuple):
    """The sizes of a full-attention layer.

    Attributes:
        hidden: channels of a token.
        inner: channels inside the feed-forward layer.
        heads: of queries.
        groups: of keys and values.
        head: channels of a head.
    """

    hidden: int
    inner: int
    heads: int
    groups: int
    head: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return those of a model, by its (text) configuration."""
        layer = full_layer(config)
        hidden, heads = layer.hidden_size, layer.num_attention_heads
        inner = getattr(layer, "intermediate_size", None) or 4 * hidden
        return cls(
            hidden,
            inner[0] if isinstance(inner, list) else inner,  # Gemma 3n lists every layer's
            heads,
            getattr(layer, "num_key_value_heads", None) or heads,
            getattr(layer, "head_dim", None) or hidden // heads,
        )


def own_sizes(config: Any, options: LayerOptions) -> LayerSizes:
    """Return the sizes of a drafter's own layers: a target's, where the options name no others.

    Raises:
        ValueError: heads cannot share so many keys and values.
    """
    named = {
        "heads": options.heads,
        "groups": options.groups,
        "head": options.head_size,
        "inner": options.intermediate,
    }
    sizes = LayerSizes.of(config)._replace(**{k: n for k, n in named.items() if n is not None})
    if sizes.heads % sizes.groups:
        raise ValueError(
            f"{sizes.heads} attention heads cannot share {sizes.groups} of keys and values: set "
            "heads to a multiple of groups"
        )
    return sizes


def short_config(config: Any, layers: int) -> Any:
    """Copy a model's configuration with ``layers`` full-attention layers and no vocabulary."""
    shortened = copy.deepcopy(full_layer(config))
    shortened.num_hidden_layers = layers
    shortened.vocab_size = 1
    shortened.pad_token_id = None  # an index into the vocabulary that is gone
    if getattr(config, "layer_types", None):
        shortened.layer_types = [FULL] * layers
    elif getattr(config, "sliding_window", None):
        shortened.sliding_window = max_positions(config)  # none, by a number that all families take
    if getattr(config, "num_kv_shared_layers", None):
        shortened.num_kv_shared_layers = 0  # Gemma 3n's last layers read the keys of others
    return shortened
