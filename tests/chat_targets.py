"""Tiny targets with a chat template, whose texts are soon over.

``from chat_targets import chat_target`` works in every test (``conftest.py`` sees to it).
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from falcon_lab.model.target import Target
from tiny_models import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][:1] + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
"""A letter for who speaks, and an end token."""
VOCABULARY = 26


def chat_target(seed: int = 0) -> Target:
    """Make a target in memory: when it samples, one token of 26 ends its text."""
    model, tokenizer = _parts(seed)
    return Target(model, tokenizer, name="tiny-chat", lean=True)


def save_chat_target(folder: Path, seed: int = 0) -> Path:
    """Save the same as a Hugging Face folder."""
    for part in _parts(seed):
        part.save_pretrained(folder)
    return folder


def _parts(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    model = tiny_model("llama", vocab=VOCABULARY, layers=1, hidden=16, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)  # no token is likely
    tokenizer = tiny_tokenizer(VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer
