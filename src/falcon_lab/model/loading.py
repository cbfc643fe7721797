"""Load a causal LM from the hub or a folder, and prove that it can be a target.

What cannot be a target is refused in one line: by its configuration, by its files
(``checkpoint.py``), and by a few tokens, verified as a tree (``self_check.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Never

import torch

from falcon_lab.config.schema import DTYPES, TargetConfig
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.files import about
from falcon_lab.model.attention.choosing import MERGING, loading_attention, use_backend
from falcon_lab.model.checkpoint import check_weights, lacking
from falcon_lab.model.families import WITH_STATE, layer_kinds
from falcon_lab.model.gguf import converted
from falcon_lab.model.gguf_header import is_gguf
from falcon_lab.model.masks import ATTENTION
from falcon_lab.model.memory import check_room
from falcon_lab.model.self_check import check_target
from falcon_lab.model.target import Target

log = logging.getLogger(__name__)

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How Hugging Face's classes with an LM head are called."""


def load_target(config: TargetConfig, announce: Callable[[str], None] = log.info) -> Target:
    """The frozen target, on its device, proven to be one by a few tokens.

    Code from a model's repository is never run, and pickled weights are not read. ``announce`` is
    called with a line on the attention that was chosen, where the configuration leaves that open,
    and where a GGUF file is converted.

    Raises:
        FalconLabError: with the reason and the file or key at fault.
    """
    if config.dtype not in DTYPES:
        _refuse_choice("target.dtype", config.dtype, DTYPES)
    if config.attention not in (*ATTENTION, *MERGING):
        _refuse_choice("target.attention", config.attention, (*ATTENTION, *MERGING))
    device = resolve_device(config.device)
    if is_gguf(config.name):
        return _load_gguf(config, announce)
    settings = _read_settings(config)
    refuse_unfit(config, settings)
    tokenizer = _read_tokenizer(config)
    attention, reason = _loading_attention(config, settings)
    model = _read_model(config, settings, attention)
    revision = getattr(settings, "_commit_hash", None) or config.revision
    target = Target(model, tokenizer, name=config.name, revision=revision, lean=config.lean).to(
        device
    )
    if config.attention in MERGING:
        use_backend(target, config.attention, announce, reason=reason)
    check_vocabulary(target)
    check_target(target)
    return target


def outlined_target(config: TargetConfig, tokenizer: Any, settings: Any = None) -> Target:
    """Return a target whose weights are shapes without values: it takes no room, and cannot run.

    Args:
        config: of which ``name`` may be a folder with a ``config.json`` alone.
        tokenizer: it is given, whatever its own is.
        settings: its Hugging Face configuration; None reads it.

    Raises:
        FalconLabError: its configuration cannot be read, or is of no target.
    """
    from transformers import AutoModelForCausalLM

    if settings is None:
        if is_gguf(config.name):
            folder = converted(Path(config.name), log.info, partial(refuse_unfit, config))
            config = replace(config, name=str(folder))
        settings = _read_settings(config)
    refuse_unfit(config, settings)
    own = settings.get_text_config(decoder=True).dtype or torch.float32
    dtype = own if config.dtype == "auto" else getattr(torch, config.dtype)
    attention, _ = _loading_attention(config, settings)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=attention
            )
            return Target(model, tokenizer, name=config.name)
    except FalconLabError:
        raise
    except Exception as error:  # transformers raises whatever a strange configuration leads to
        _refuse(config, error)


def _load_gguf(config: TargetConfig, announce: Callable[[str], None]) -> Target:
    """Load a GGUF file as the folder that it is converted into, under its own name."""
    folder = converted(Path(config.name), announce, partial(refuse_unfit, config))
    try:
        target = load_target(replace(config, name=str(folder)), announce)
    except FalconLabError as error:
        raise FalconLabError(f"{config.name}: {error}") from error
    target.name = config.name
    return target


def resolve_device(name: str) -> torch.device:
    """Return the device of ``target.device``; ``auto`` is the GPU where there is one.

    Raises:
        FalconLabError: when there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FalconLabError(f"target.device is {name!r}; say auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise FalconLabError(f"target.device is {name!r}; say auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise FalconLabError(
            f"target.device is {name!r}, and torch sees {torch.cuda.device_count()} CUDA devices; "
            "say auto or cpu"
        )
    return device


def refuse_unfit(config: TargetConfig, settings: Any) -> None:
    """Refuse what the model's configuration already shows to be no target.

    Raises:
        FalconLabError: with the reason.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind = settings.model_type
    known = CLASSES.get(kind)
    text = settings.get_text_config(decoder=True)
    _check_types(config, settings, text)
    named = settings.architectures or []
    with_head = [a for a in named if a.endswith(CAUSAL) or a == known]
    if known is None:
        raise FalconLabError(
            f"target {config.name} has no LM head: it is a {kind}, and transformers knows no "
            "causal language model of that type; choose another target (…ForCausalLM)"
        )
    if named and not with_head:
        raise FalconLabError(
            f"target {config.name} has no LM head: it is a {', '.join(named)}; choose a "
            "causal language model (…ForCausalLM)"
        )
    try:
        layer_kinds(text)
    except FalconLabError as error:
        raise FalconLabError(f"target {config.name}: {error}") from error
    _refuse_state(config.name, kind, known)
    if getattr(text, "attn_logit_softcapping", None) and config.attention == "sdpa":
        raise FalconLabError(
            f"target {config.name} caps its attention scores, which sdpa does not do; set "
            "target.attention=eager"
        )


READ: dict[str, tuple[type, ...]] = {
    "architectures": (list, str),
    "layer_types": (list, str),
    "layers_block_type": (list, str),
    "attention_layers": (list, str),
    "num_hidden_layers": (int,),
    "hidden_size": (int,),
    "vocab_size": (int,),
    "sliding_window": (int,),
    "attn_logit_softcapping": (int, float),
    "final_logit_softcapping": (int, float),
    "logit_scale": (int, float),
    "logits_scaling": (int, float),
}
"""Keys of a stranger's config.json that are read here -> their types; of a list, its items' too."""


def _check_types(config: TargetConfig, *parts: Any) -> None:
    """Check what is read of a model's configuration; some families leave that to their users."""
    for part in parts:
        for key, (kind, *others) in READ.items():
            value = getattr(part, key, None)
            right = value is None or (
                isinstance(value, (kind, *others)) and not isinstance(value, bool | str)
            )
            if right and isinstance(value, list | tuple):
                right = all(isinstance(item, str) for item in value)
            if not right:
                words = "a list of texts" if kind is list else "a number"
                raise FalconLabError(
                    f"target {config.name}: {key} in its config.json is {value!r:.60}; it must be "
                    f"{words}"
                )


def _loading_attention(config: TargetConfig, settings: Any) -> tuple[str, str | None]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    architecture = getattr(transformers, str(CLASSES.get(settings.model_type)), None)
    text = settings.get_text_config(decoder=True)
    return loading_attention(config.attention, text, architecture)


def _refuse_state(name: str, kind: str, class_name: Any) -> None:
    """Refuse recurrent models that do not list their layers."""
    import transformers

    if getattr(getattr(transformers, str(class_name), None), "_is_stateful", False):
        raise FalconLabError(f"target {name} {WITH_STATE.format(kinds=kind)}")


def check_vocabulary(target: Target) -> None:
    """Refuse a tokenizer that can write tokens which the model does not know.

    Raises:
        FalconLabError: with both sizes.
    """
    largest = max(target.tokenizer.get_vocab().values())
    rows = min(target.vocab_size, target.model.get_input_embeddings().weight.shape[0])
    if largest >= rows:
        raise FalconLabError(
            f"target {target.name}: its tokenizer has token {largest} ({len(target.tokenizer)} "
            f"entries) and the model knows {rows}; it is the tokenizer of another model, or "
            "tokens were added without resizing the embeddings"
        )


def _read_settings(config: TargetConfig) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.name, **_source(config))
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more
        _refuse(config, error)


def _read_tokenizer(config: TargetConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.name, **_source(config))
        words = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    except Exception as error:  # as above, and tokenizers raises plain Exceptions
        raise _no_tokenizer(config, one_line(error)[:300]) from error
    if not words:  # some releases make an empty one where the files are missing
        raise _no_tokenizer(config, "it has no vocabulary")
    return tokenizer


def _no_tokenizer(config: TargetConfig, reason: str) -> FalconLabError:
    return FalconLabError(
        f"target {config.name} has no tokenizer that can be read: {reason}; save it beside the "
        "weights with tokenizer.save_pretrained"
    )


def _read_model(config: TargetConfig, settings: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    stored = check_weights(Path(config.name)) if _is_folder(config) else None
    try:
        _check_room(config, settings, stored)
        model, report = AutoModelForCausalLM.from_pretrained(
            config.name,
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
            **_source(config),
        )
    except FalconLabError:
        raise
    except Exception as error:  # as above
        _name_broken_file(config)
        _refuse(config, error)
    if missing := lacking(report):
        raise FalconLabError(
            f"target {config.name} lacks weights: {missing}; they are another model's than its "
            "config.json, or of the base model alone, without an LM head: fetch or save it again"
        )
    return model


def _check_room(config: TargetConfig, settings: Any, stored: int | None) -> None:
    """Check that the model fits on the machine, then on its device, and is the one that is stored.

    ``stored``: numbers in the folder's files; None: not known.
    """
    from transformers import AutoModelForCausalLM

    if getattr(settings, "quantization_config", None):
        return  # its weights are smaller than those of a fresh model
    dtype = {} if config.dtype == "auto" else {"dtype": getattr(torch, config.dtype)}
    make = cache(partial(AutoModelForCausalLM.from_config, settings, **dtype))
    text, device = settings.get_text_config(decoder=True), resolve_device(config.device)
    for place in (None, device) if device.type == "cuda" else (None,):
        numbers = check_room(text, make, f"target {config.name}", device=place)
    if stored is not None and numbers is not None and numbers > 2 * stored:
        raise FalconLabError(
            f"target {config.name}: its config.json describes {numbers} numbers, and its files "
            f"hold {stored}: one of them is another model's; fetch or save it again"
        )


def _is_folder(config: TargetConfig) -> bool:
    with about(config.name, "read"):
        return Path(config.name).is_dir()


def _name_broken_file(config: TargetConfig) -> None:
    """Search for a broken file among those that were fetched from the hub."""
    from transformers.utils import cached_file

    if not _is_folder(config):
        found = cached_file(config.name, "config.json", revision=config.revision)
        check_weights(Path(found).parent)


def _source(config: TargetConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": False}


REASONS = {
    "trust_remote_code": "it needs code from its repository, which is never run; choose a model "
    "that transformers has itself",
    "attention implementation": "it does not support {attention}; set target.attention=eager",
    "ignore_mismatched_sizes": "its weights have other shapes than its config.json says: one of "
    "them is another model's; fetch or save it again",
    "does not recognize this architecture": "the installed transformers has no model of its "
    "type; install a newer one, or choose another target",
}
"""Part of what transformers says -> what it means here."""


def _refuse(config: TargetConfig, error: Exception) -> Never:
    said = str(error)
    reason = next((words for part, words in REASONS.items() if part in said), None)
    if reason is not None:
        reason = reason.format(attention=config.attention)
    elif _is_folder(config) and (files := sorted(Path(config.name).glob("*.gguf"))):
        reason = f"a folder of GGUF files, of which one must be named: target.name={files[0]}"
    elif _is_folder(config):
        reason = (
            f"{one_line(error)[:300]}; save it again with save_pretrained, or choose another target"
        )
    else:
        reason = f"no folder of that name, and as a hub id: {one_line(error)[:300]}"
    raise FalconLabError(f"target {config.name} cannot be loaded: {reason}") from error


def _refuse_choice(key: str, value: str, choices: tuple[str, ...]) -> Never:
    raise FalconLabError(f"{key} is {value!r}; choose one of {', '.join(choices)}")
