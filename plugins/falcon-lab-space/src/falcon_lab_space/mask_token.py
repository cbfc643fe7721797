"""The mask token of a target: which one it is, and its row among the embeddings."""

from __future__ import annotations

import re
from typing import Any

import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.model.target import end_tokens

RESERVED = re.compile(r"reserved|unused|<\|?mask\|?>|\[MASK\]", re.IGNORECASE)
"""What tokens are called that a tokenizer has for later uses."""

NEW = "<|mask|>"
"""The token that is added where there is none to take."""


def take_mask_token(model: Any, tokenizer: Any, wanted: str | None) -> int:
    """Make a token the tokenizer's mask token, and return it; the model has a row for it then.

    Args:
        model: a causal LM; its embeddings grow by a row where the token is new and none is spare.
        tokenizer: is told.
        wanted: the token; None takes the tokenizer's mask token, a reserved one, or a new one.

    Raises:
        FalconLabError: the token is used for something else.
    """
    added = tokenizer.get_added_vocab()
    name = wanted or tokenizer.mask_token or _reserved(added) or NEW
    _refuse_used(name, model, tokenizer)
    tokenizer.add_special_tokens({"mask_token": name})
    token = int(tokenizer.convert_tokens_to_ids(name))
    rows = model.get_input_embeddings().weight.shape[0]
    if token >= rows:
        _add_row(model, token + 1)
    return token


def _reserved(added: dict[str, int]) -> str | None:
    return next(
        (name for name in sorted(added, key=added.__getitem__) if RESERVED.search(name)), None
    )


def _refuse_used(name: str, model: Any, tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    others = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    ends = end_tokens(model, tokenizer)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    if name in vocabulary and name not in tokenizer.get_added_vocab():
        why = "is a token of ordinary text"
    elif name in others or vocabulary.get(name) in ends:
        why = "begins, ends or fills texts"
    elif name in template:
        why = "is in the chat template"
    else:
        return
    raise FalconLabError(
        f"target.tune.mask_token: {name!r} {why}; name a special token that is never used, or "
        "a new one"
    )


@torch.no_grad()
def _add_row(model: Any, rows: int) -> None:
    """Grow embeddings and LM head; new rows are the mean of the others."""
    before = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.weight[before:] = part.weight[:before].float().mean(0).to(part.weight.dtype)
