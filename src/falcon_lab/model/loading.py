"""Load a causal LM from the hub or a folder, and prove that it can be a target.

What cannot be a target is refused in one line. Whether a family reads position ids, supports a 4-D
mask, stores nothing outside the cache and has no unknown scale on its logits is not written in any
configuration: a few tokens, verified as a tree when the target is loaded, show it.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.model.attention.choosing import MERGING, loading_attention, use_backend
from falcon_lab.model.gguf import converted
from falcon_lab.model.gguf_header import is_gguf
from falcon_lab.model.masks import ATTENTION
from falcon_lab.model.memory import check_room
from falcon_lab.model.target import Target
from falcon_lab.tree import TokenTree, ancestor_matrix

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

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
    from falcon_lab.model.target import Target

    if config.dtype not in DTYPES:
        _refuse_choice("target.dtype", config.dtype, DTYPES)
    if config.attention not in (*ATTENTION, *MERGING):
        _refuse_choice("target.attention", config.attention, (*ATTENTION, *MERGING))
    device = resolve_device(config.device)
    if is_gguf(config.name):
        folder = converted(Path(config.name), announce, partial(refuse_unfit, config))
        target = load_target(replace(config, name=str(folder)), announce)
        target.name = config.name
        return target
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


def resolve_device(name: str) -> torch.device:
    """Return the device of ``target.device``; ``auto`` is the GPU where there is one.

    Raises:
        FalconLabError: when there is no such device.
    """
    import torch

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

    from falcon_lab.model.families import layer_kinds

    kind = settings.model_type
    known = CLASSES.get(kind)
    text = settings.get_text_config(decoder=True)
    _check_types(config, settings, text)
    named = settings.architectures or []
    with_head = [a for a in named if a.endswith(CAUSAL) or a == known]
    if known is None:
        raise FalconLabError(
            f"target {config.name} has no LM head: transformers knows no causal language model of "
            f"type {kind}; choose another target (…ForCausalLM)"
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

    from falcon_lab.model.families import WITH_STATE

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


def check_weights(folder: Path) -> None:
    """Open every safetensors file of a model folder.

    Raises:
        FalconLabError: naming the file that is missing, cut short or corrupt.
    """
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except FileNotFoundError:
            raise FalconLabError(
                f"{path} is missing, and {folder.name}'s index names it; fetch it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise FalconLabError(
                f"{path} is cut short or corrupt ({_line(error)}); fetch or save it again"
            ) from error


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        pickled = " (pickled ones are not read)" if any(folder.glob("*.bin")) else ""
        raise FalconLabError(
            f"{folder} has no safetensors weights{pickled}; save the model there with "
            "save_pretrained"
        )
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise FalconLabError(f"{index} is no index of weights ({_line(error)})") from error
    return [folder / name for name in sorted(names)]


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
        raise _no_tokenizer(config, _line(error)) from error
    if not words:  # some releases make an empty one where the files are missing
        raise _no_tokenizer(config, "it has no vocabulary")
    return tokenizer


def _no_tokenizer(config: TargetConfig, reason: str) -> FalconLabError:
    return FalconLabError(
        f"target {config.name} has no tokenizer that can be read: {reason}; save it beside the "
        "weights with tokenizer.save_pretrained"
    )


def _read_model(config: TargetConfig, settings: Any, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if (folder := Path(config.name)).is_dir():
        check_weights(folder)
    try:
        _check_room(config, settings)
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
    if missing := sorted(report["missing_keys"]):
        shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        raise FalconLabError(
            f"target {config.name} lacks weights: {shown}; a checkpoint of the base model alone "
            "has no LM head"
        )
    return model


def _check_room(config: TargetConfig, settings: Any) -> None:
    """Check that the model fits on the machine, and then on its device."""
    import torch
    from transformers import AutoModelForCausalLM

    if getattr(settings, "quantization_config", None):
        return  # its weights are smaller than those of a fresh model
    dtype = {} if config.dtype == "auto" else {"dtype": getattr(torch, config.dtype)}
    make = partial(AutoModelForCausalLM.from_config, settings, **dtype)
    text, device = settings.get_text_config(decoder=True), resolve_device(config.device)
    for place in (None, device) if device.type == "cuda" else (None,):
        check_room(text, make, f"target {config.name}", device=place)


def _name_broken_file(config: TargetConfig) -> None:
    """Search for a broken file among those that were fetched from the hub."""
    from transformers.utils import cached_file

    if not Path(config.name).is_dir():
        found = cached_file(config.name, "config.json", revision=config.revision)
        check_weights(Path(found).parent)


def _source(config: TargetConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": False}


def _refuse(config: TargetConfig, error: Exception) -> Never:
    reason = _line(error)
    if "trust_remote_code" in str(error):
        reason = "it needs code from its repository, which is never run; choose a model that "
        reason += "transformers has itself"
    elif "attention implementation" in str(error):
        reason = f"it does not support {config.attention}; set target.attention=eager"
    elif not Path(config.name).exists():
        reason = f"no folder of that name, and as a hub id: {reason}"
    raise FalconLabError(f"target {config.name} cannot be loaded: {reason}") from error


def _refuse_choice(key: str, value: str, choices: tuple[str, ...]) -> Never:
    raise FalconLabError(f"{key} is {value!r}; choose one of {', '.join(choices)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Share of the largest logit by which two kernels may differ; a wrong mask is far beyond it."""


@torch.no_grad()
def check_target(target: Target) -> None:
    """Compare our ways of reading six tokens with the model's own.

    Raises:
        FalconLabError: when they disagree or the model cannot be called so, with the reason.
    """
    tokens = _tokens(target)
    positions = torch.arange(tokens.shape[0], device=tokens.device)[None]
    try:
        expected = target.model(input_ids=tokens[None], use_cache=False).logits[0]
        packed = target.teacher(tokens[None], torch.zeros_like(positions), positions)[0]
        _compare(target, target.head(packed), expected, "its LM head on our features")
        _compare(target, _by_tree(target, tokens), expected[2:], "a verified tree of drafts")
        _check_window(target, tokens, positions)
    except FalconLabError:
        raise
    except Exception as error:  # whatever a model of an unknown kind raises
        reason = f"{type(error).__name__}: {_line(error)}"
        raise _no_target(
            target, f"it cannot be run with explicit positions, mask and cache ({reason})"
        ) from error


def _check_window(target: Target, tokens: Tensor, positions: Tensor) -> None:
    """Compare the same under a window of three tokens, where the configuration has a window.

    Some families have one in their configuration that Hugging Face's cache cuts by, and that their
    attention knows nothing of: what they write depends on how they are called.
    """
    backbone = target.backbone
    if backbone.window is None:
        return
    window, backbone.window = backbone.window, 3
    try:
        backbone.config.sliding_window = 3
        expected = target.model(input_ids=tokens[None], use_cache=False).logits[0]
        packed = target.teacher(tokens[None], torch.zeros_like(positions), positions)[0]
    finally:
        backbone.config.sliding_window = backbone.window = window
    if _difference(target, target.head(packed), expected):
        raise FalconLabError(
            f"target {target.name}: its config.json has a sliding_window of {window}, which "
            f"{target.config.model_type} knows nothing of and Hugging Face's cache cuts by; set it "
            f"to the {target.max_positions} positions that the model was made for"
        )


def _tokens(target: Target) -> Tensor:
    """Return six tokens, spread over the vocabulary and the same every time."""
    spread = [(7919 * i + 1) % target.vocab_size for i in range(6)]
    return torch.tensor(spread, device=target.device)


def _by_tree(target: Target, tokens: Tensor) -> Tensor:
    """Return logits of tokens 2..5: a prefix of two, a tree with a side branch, commit, step."""
    cache = target.new_cache(8)
    target.prefill(tokens[:2], cache)
    parents = torch.tensor([-1, 0, 0, 2], device=tokens.device)
    path = [0, 2, 3]
    tree = TokenTree(
        tokens=tokens[torch.tensor([2, 5, 3, 4], device=tokens.device)],
        parents=parents,
        depth=torch.tensor([0, 1, 1, 2], device=tokens.device),
        ancestors=ancestor_matrix(parents),
        proposal="deterministic",
        log_q=torch.zeros(4, device=tokens.device),
    )
    verified = target.verify(tree, cache).logits[path]
    cache.commit([2], [path])
    return torch.cat([verified, target.step(tokens[5], cache).logits])


def _compare(target: Target, ours: Tensor, expected: Tensor, what: str) -> None:
    if off := _difference(target, ours, expected):
        raise _no_target(
            target,
            f"{what} gives other logits than the model itself (off by {off} of the largest one)",
        )


def _difference(target: Target, ours: Tensor, expected: Tensor) -> str | None:
    """Return by how much logits differ, beyond what kernels round differently; None: they agree."""
    scale = expected.float().abs().max()
    off = float((ours.float() - expected.float()).abs().max() / scale)
    # NaN compares false: it is refused as well.
    return None if off <= TOLERANCE.get(target.dtype, 1e-1) else f"{off:.1%}"


def _no_target(target: Target, reason: str) -> FalconLabError:
    return FalconLabError(
        f"{target.name} ({target.config.model_type}) cannot be a target: {reason}; choose a target "
        "of another family"
    )
