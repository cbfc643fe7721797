"""One short name for a target's weights, configuration and vocabulary.

A saved drafter and a feature store name the target that they belong to by it. It is taken from
what was loaded, reads a sample of every weight, and stays the same in another precision, on
another device and with another release of transformers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

SAMPLE = 256
"""Values of each weight that are looked at."""

FACTS = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "sliding_window",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)
"""What the weights do not tell, of the configuration. Not all of it: releases add keys."""


def fingerprint(model: Any, tokenizer: Any) -> str:
    """Return the fingerprint, sixteen hex digits."""
    config = model.config.get_text_config(decoder=True)
    digest = hashlib.sha256()
    facts = {fact: getattr(config, fact, None) for fact in FACTS}
    facts["vocabulary"] = sorted(tokenizer.get_vocab().items())
    facts["rope_theta"] = _rope_bases(config)
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(_sample(weight.detach()))
    return digest.hexdigest()[:16]


def _sample(weight: Tensor) -> bytes:
    """Take evenly spread values, rounded to bfloat16 (rounding twice changes nothing)."""
    if weight.is_meta:  # an outline's, which has a shape alone
        return b""
    flat = weight.reshape(-1)
    picked = flat[:: max(1, flat.shape[0] // SAMPLE)].to("cpu", torch.bfloat16)
    return picked.contiguous().view(torch.uint8).numpy().tobytes()


def _rope_bases(config: Any) -> Any:
    """Return the rotary base, of each kind of layer where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {k: v.get("rope_theta") for k, v in parameters.items() if isinstance(v, dict)}
    return nested or parameters.get("rope_theta", getattr(config, "rope_theta", None))
