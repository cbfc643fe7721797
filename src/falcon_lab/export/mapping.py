"""What formats have in common: names of tensors, draft vocabularies, the target's own tables.

Shapes: V vocabulary of the target, n of a draft vocabulary, H hidden.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about
from falcon_lab.interfaces import StrangersFolder
from falcon_lab.model.families import LayerSizes

IDS = "draft_vocabulary.ids"
"""Name of a drafter's draft vocabulary among its weights."""

PROBED = 3
"""Tokens by which a target's embeddings and LM head are compared with their weights."""


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors by new names, each of which must be there.

    Args:
        tensors: some weights.
        names: every name -> the new one.

    Raises:
        FalconLabError: one is missing or one too many.
    """
    missing, unknown = sorted(set(names) - set(tensors)), sorted(set(tensors) - set(names))
    if missing or unknown:
        problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is one too many"
        raise FalconLabError(f"among its tensors {problem}; export or copy it again")
    return {new: tensors[old] for old, new in names.items()}


def reversed_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return the way back of a renaming."""
    return {new: old for old, new in names.items()}


def without(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Return tensors but for some that may be among them."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


class Tables(NamedTuple):
    """The target's embeddings and the rows of its LM head, ``[V, H]`` each."""

    embeddings: Tensor
    head: Tensor


@torch.no_grad()
def plain_tables(host: Any) -> Tables:
    """Return the tables of a target that reads and writes by them alone.

    Engines give a drafter the target's tables and nothing of what a family does around them.

    Raises:
        FalconLabError: the target scales its embeddings, or does more behind its LM head.
    """
    embedding = host.model.get_input_embeddings().weight
    head = host.model.get_output_embeddings().weight
    tokens = torch.arange(PROBED, device=embedding.device)
    if not torch.equal(host.embed(tokens), embedding[tokens]):
        raise FalconLabError(
            f"{host.name} does not read its embeddings as they are (it scales them), which engines "
            "do not tell a drafter; no format can say so"
        )
    rows = embedding[tokens].to(head.dtype) + 1
    if not torch.allclose(host.head(rows), rows @ head.T, rtol=1e-3, atol=1e-3):
        raise FalconLabError(
            f"{host.name} does more behind its LM head than a product (it scales or caps logits), "
            "which engines do not tell a drafter; no format can say so"
        )
    return Tables(embedding.detach().cpu(), head.detach().cpu())


def vocabulary_maps(ids: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """Return a draft vocabulary as EAGLE-3's code and the engines have it.

    Args:
        ids: ``[n]`` long, the target's token of each column.
        vocabulary: V.

    Returns:
        ``d2t`` ``[n]`` long: what is added to a column to be the target's token; ``t2d`` ``[V]``
        bool: whether a token has a column.
    """
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known_tokens(ids, vocabulary)}


def ids_of(offsets: Tensor) -> Tensor:
    """Return the target's tokens of the columns of ``d2t``."""
    return offsets + torch.arange(len(offsets))


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the precision of weights, as a ``config.json`` names it."""
    floating = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    return str(floating.dtype).removeprefix("torch.")


def token_ids(config: Any) -> dict[str, Any]:
    """Return the special tokens of a target's configuration."""
    return {f"{name}_token_id": getattr(config, f"{name}_token_id", None) for name in SPECIAL}


SPECIAL = ("bos", "eos", "pad")


def vllm_command(folder: str, target: str, method: str, tokens: int) -> str:
    """Return how vLLM serves a target with a drafter beside it, as Markdown.

    Args:
        folder: of the drafter.
        target: its hub id or folder.
        method: what vLLM calls such drafters.
        tokens: that are drafted a round.
    """
    speculative = {"method": method, "model": folder, "num_speculative_tokens": tokens}
    return f"```\nvllm serve {target} --speculative-config '{json.dumps(speculative)}'\n```"


def sglang_command(folder: str, target: str, algorithm: str, chain: int | None = None) -> str:
    """Return how SGLang serves a target with a drafter beside it, as Markdown.

    Args:
        folder: of the drafter.
        target: its hub id or folder.
        algorithm: what SGLang calls such drafters.
        chain: tokens that are drafted a round, one after the other, to which SGLang adds the root;
            None: the drafter's own configuration says it.
    """
    steps = (
        ""
        if chain is None
        else (
            f" --speculative-num-steps {chain} --speculative-eagle-topk 1"
            f" --speculative-num-draft-tokens {chain + 1}"
        )
    )
    return (
        f"```\npython -m sglang.launch_server --model-path {target} --speculative-algorithm "
        f"{algorithm} --speculative-draft-model-path {folder}{steps}\n```"
    )


# --- folders of others --------------------------------------------------------------------------

CLOSE = 2.0**-8
"""How far the target's tables may be from a copy in half precision, relatively."""
PLAIN_ROPE = (None, "default")
"""Types of rotary embeddings that are those of the paper."""


def unpickled(file: Path) -> Any:
    """Return what a file of torch's holds, of tensors and plain values alone.

    Raises:
        FalconLabError: it holds anything else, or is damaged.
    """
    try:
        with about(file, "read"):
            return torch.load(file, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        raise FalconLabError(
            f"{file}: is damaged, or holds something else than tensors and plain values, which is "
            "not read; copy it again, or convert it to safetensors"
        ) from error


DAMAGED = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError)
"""What torch's restricted reader raises about a file."""


def check_sizes(folder: StrangersFolder, host: Any) -> None:
    """See that a drafter was made for a target of these sizes.

    Raises:
        FalconLabError: it was not.
    """
    for key, theirs in (
        ("target_hidden_size", host.hidden_size),
        ("hidden_size", host.hidden_size),
        ("vocab_size", host.vocab_size),
        ("num_target_layers", host.config.num_hidden_layers),
    ):
        found = folder.config.get(key)
        if found is not None and found != theirs:
            raise FalconLabError(
                f"its config.json has {key}: {found!r}, and the target {host.name} has {theirs}; "
                "name the target that it was trained for by --target"
            )


def rope_base(folder: StrangersFolder, default: float) -> float:
    """Return the base of the rotary embeddings of a folder's layers.

    Args:
        folder: of somebody else.
        default: what its program takes where nothing is said.

    Raises:
        FalconLabError: they are scaled.
    """
    given = folder.section("rope_parameters") or folder.section("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type"))
    if kind not in PLAIN_ROPE:
        raise FalconLabError(
            f"its config.json has rotary embeddings of the type {kind!r}, and drafters of ours "
            "have plain ones alone"
        )
    base = given.get("rope_theta")
    return float(folder.number("rope_theta", default) if base is None else base)


def layer_options(folder: StrangersFolder, host: Any, default_base: float) -> dict[str, Any]:
    """Return the options of ``LayerOptions`` that a folder's configuration stands for.

    Args:
        folder: of somebody else.
        host: the target, whose sizes need no option.
        default_base: of its rotary embeddings, where nothing is said.

    Raises:
        FalconLabError: the configuration is not that of such layers.
    """
    heads = folder.count("num_attention_heads")
    found = {
        "heads": heads,
        "groups": folder.count("num_key_value_heads", heads),
        "head_size": folder.count("head_dim", host.hidden_size // heads),
        "intermediate": folder.count("intermediate_size"),
    }
    theirs = LayerSizes.of(host.config)
    same = zip(found, (theirs.heads, theirs.groups, theirs.head, theirs.inner), strict=True)
    options: dict[str, Any] = {key: found[key] for key, size in same if found[key] != size}
    return {**options, "rope_base": rope_base(folder, default_base)}


def take_table(folder: StrangersFolder, name: str, expected: Tensor, what: str) -> None:
    """Take a copy of a table of the target, if it is there, and see that it is one.

    Args:
        folder: of somebody else.
        name: of the tensor.
        expected: the target's own.
        what: it is, for the message.

    Raises:
        FalconLabError: it is another.
    """
    found = folder.tensors.pop(name, None)
    if found is not None and not same_rows(found, expected):
        raise FalconLabError(
            f"its {name} is not the target's {what}, which drafters of ours read; name the target "
            "that it was trained for by --target"
        )


def same_rows(found: Tensor, expected: Tensor) -> bool:
    """Return whether a table is another one's copy, in any precision."""
    if found.shape != expected.shape:
        return False
    return torch.allclose(found.float(), expected.float().to(found.device), rtol=CLOSE, atol=1e-6)


def take_vocabulary(folder: StrangersFolder, vocabulary: int) -> Tensor | None:
    """Take a draft vocabulary, ``[n]`` long; None where all tokens are drafted.

    Args:
        folder: of somebody else.
        vocabulary: V.

    Raises:
        FalconLabError: ``d2t`` and ``t2d`` do not say one.
    """
    offsets, known = folder.tensors.pop("d2t", None), folder.tensors.pop("t2d", None)
    if offsets is None:
        if known is not None and not bool(known.all()):
            raise FalconLabError("among its tensors d2t is missing, and t2d is there")
        return None
    told = folder.config.get("draft_vocab_size")
    if offsets.ndim != 1 or offsets.is_floating_point() or told not in (None, len(offsets)):
        raise FalconLabError(
            f"its d2t is {offsets.dtype} of the shape {list(offsets.shape)}, and its config.json "
            f"has draft_vocab_size: {told!r}; copy it again"
        )
    ids = ids_of(offsets.long())
    if known is not None and not torch.equal(known.bool(), known_tokens(ids, vocabulary)):
        raise FalconLabError("its d2t and its t2d name different tokens of the target")
    return None if torch.equal(ids, torch.arange(vocabulary)) else ids


def known_tokens(ids: Tensor, vocabulary: int) -> Tensor:
    """Return ``[V]`` bool, whether a token has a column; tokens beyond V have none."""
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[ids[(ids >= 0) & (ids < vocabulary)]] = True
    return known
