"""Heads of other programs: folders by their names and keys, without a word of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import KNOWN, VOCAB, text
from safetensors.torch import save_file
from test_eagle_exports import Reader
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

from falcon_lab import testing
from falcon_lab.config.saved import read_description
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.export.strangers import import_strangers
from falcon_lab.interfaces import Exported, Frontier, Observation
from falcon_lab.model.target import Target

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]
HIDDEN, WIDE, HEAD = 32, 40, 8
LAYERS = 8


@cache
def target() -> Target:
    """One with so many layers that the official three are in order."""
    return testing.tiny_target(vocab=VOCAB, layers=LAYERS)


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def block(name: str, width: int, wide: int = WIDE) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama's layer but for its input norm: 4 heads, 2 of keys and values."""
    return {
        f"{name}.self_attn.q_proj.weight": (4 * HEAD, width),
        f"{name}.self_attn.k_proj.weight": (2 * HEAD, width),
        f"{name}.self_attn.v_proj.weight": (2 * HEAD, width),
        f"{name}.self_attn.o_proj.weight": (HIDDEN, 4 * HEAD),
        f"{name}.mlp.gate_proj.weight": (wide, HIDDEN),
        f"{name}.mlp.up_proj.weight": (wide, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, wide),
        f"{name}.post_attention_layernorm.weight": (HIDDEN,),
    }


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "torch_dtype": "float16",
}


def eagle3(layer: str = "midlayer") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3 over nine tokens, with an LM head of its own, as its authors publish it."""
    tensors = drawn(
        {
            **block(layer, 2 * HIDDEN),
            f"{layer}.hidden_norm.weight": (HIDDEN,),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            "fc.weight": (HIDDEN, 3 * HIDDEN),
            "norm.weight": (HIDDEN,),
            "lm_head.weight": (9, HIDDEN),
        }
    )
    tensors["d2t"] = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3])
    tensors["t2d"] = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    tensors["embed_tokens.weight"] = target().model.get_input_embeddings().weight.half()
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}
    return config, tensors


def imported(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], **given: Any) -> Any:
    """The drafter that is made of a folder, which is written here."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if given.pop("pickled", False):
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, path / "a.safetensors"
        )
    out = path.with_name("out")
    import_strangers(path, out, target(), KNOWN, given.get("taps"))
    return load_drafter(out, target(), KNOWN)


def of_pickles(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As the authors publish it: nothing is said of layers."""


def of_specforge(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """With what SGLang counts from below, in a list of its own."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    config |= {"eagle_config": ids, "rope_theta": 500.0, "head_dim": HEAD}
    tensors.pop("embed_tokens.weight")


def of_speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """With the layer in a configuration of its own, and the residual behind a norm."""
    inner = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config.clear()
    config |= {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
    config |= {"transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    for name in [each for each in tensors if each.startswith("midlayer.")]:
        tensors[name.replace("midlayer", "layers.0")] = tensors.pop(name)


@pytest.mark.parametrize("change", [of_pickles, of_specforge, of_speculators])
@torch.no_grad()
def test_eagle3_of_others_drafts_what_its_folder_says(tmp_path: Path, change: Change) -> None:
    config, tensors = eagle3()
    change(config, tensors)
    made = imported(tmp_path / "theirs", config, dict(tensors), pickled=change is of_pickles)
    assert made.taps == (2, 4, 5)
    tokens = text(9)
    states = target().model(tokens[None], output_hidden_states=True).hidden_states
    taps = torch.stack([states[tap][0] for tap in (2, 4, 5)], dim=1)
    made.reset(tokens[0])
    made.observe(Observation(tokens[1:], None, taps=taps[:-1]))
    drafted = made.draft(Frontier.root(torch.device("cpu")))
    logits = drafted.vocabulary.spread(drafted.logits[0, 0], -torch.inf)
    inner = {**LLAMA, "head_dim": HEAD, "rope_theta": 1e4 if change is of_pickles else 500.0}
    inner["norm_before_residual"] = change is of_speculators
    layer = "layers.0" if change is of_speculators else "midlayer"
    expected = Reader(Exported(inner, tensors), layer, target()).logits(tokens[1:], taps[:-1])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def config_with(**keys: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= keys

    return change


def tensor_with(name: str, *shape: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(shape, dtype=tensors[name].dtype if name in tensors else None)

    return change


def without(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "a tensor that nothing reads": (tensor_with("extra.scale", 2), "holds extra.scale, for"),
    "a bias": (tensor_with("midlayer.self_attn.q_proj.bias", 32), "q_proj.bias"),
    "a tensor that is not there": (without("norm.weight"), "norm.weight is missing"),
    "biases by configuration": (config_with(attention_bias=True), "attention_bias: True"),
    "a norm before the projection": (config_with(norm_before_fc=True), "norm_before_fc: True"),
    "two layers": (config_with(num_hidden_layers=2), "num_hidden_layers: 2"),
    "another hidden size": (config_with(hidden_size=64), "hidden_size: 64, and the target"),
    "another vocabulary": (config_with(vocab_size=99), "vocab_size: 99"),
    "scaled positions": (config_with(rope_scaling={"rope_type": "llama3"}), "'llama3'"),
    "layers beyond the target's": (
        config_with(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        r"\[2, 4, 8\].*--taps",
    ),
    "no layers": (config_with(eagle_config={"use_aux_hidden_state": False}), "no layers"),
    "no heads": (config_with(num_attention_heads=0), "num_attention_heads: 0"),
    "no section": (config_with(eagle_config=[1]), r"eagle_config: \[1\]"),
    "words for truth": (config_with(norm_before_residual="yes"), "norm_before_residual: 'yes'"),
    "another size of the draft vocabulary": (config_with(draft_vocab_size=8), "draft_vocab_size"),
    "no number": (config_with(rms_norm_eps="small"), "rms_norm_eps: 'small'"),
    "embeddings of its own": (tensor_with("embed_tokens.weight", 12, 32), "target's embeddings"),
    "maps that differ": (tensor_with("t2d", 12), "d2t and its t2d"),
    "tokens that are none": (tensor_with("d2t", 9), "d2t"),
    "a width that is another": (config_with(intermediate_size=41), "gate_proj"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_eagle3_of_ours_does_not_compute_is_refused_with_the_one_reason(
    tmp_path: Path, change: Change, said: str
) -> None:
    config, tensors = eagle3()
    change(config, tensors)
    with pytest.raises(FalconLabError, match=said) as error:
        imported(tmp_path / "theirs", config, tensors)
    assert str(error.value).count("theirs") == 1
    assert not (tmp_path / "out").exists()


def test_the_user_says_which_layers_a_folder_means(tmp_path: Path) -> None:
    assert imported(tmp_path / "theirs", *eagle3(), taps=[0, 3, 7]).taps == (0, 3, 7)


NODES: dict[str, dict[str, Any]] = {
    "own head": {"name": "eagle3", "head": "own", "draft_vocabulary": 9},
    "target's rows": {"name": "eagle3", "draft_vocabulary": 9, "eps": 1e-5, "heads": 2},
    "target's head": {"name": "eagle3", "taps": [1, 2, 7], "norm_before_residual": True},
    "published": {"name": "eagle", "form": "published", "layers": 2, "bias": True},
}


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("own head", "vllm"),
        ("target's rows", "speculators"),
        ("target's head", "sglang"),
        ("published", "sglang"),
    ],
)
def test_an_export_that_nobody_knows_for_ours_is_the_same_drafter(
    tmp_path: Path, node: str, name: str
) -> None:
    testing.check_import(tmp_path, target(), NODES[node], name, KNOWN)


def eagle1() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-1 of two layers, as its authors publish it: the first has no input norm."""
    theirs = json.loads(target().config.to_json_string(use_diff=False))
    wide = theirs["intermediate_size"]
    shapes = {**block("layers.0", HIDDEN, wide), **block("layers.1", HIDDEN, wide)}
    shapes["layers.1.input_layernorm.weight"] = (HIDDEN,)
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    tensors = drawn(shapes)
    tensors["embed_tokens.weight"] = target().model.get_input_embeddings().weight.half()
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {key: theirs[key] for key in (*keys, "vocab_size", "rms_norm_eps", "hidden_act")}
    return {**config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, tensors


@torch.no_grad()
def test_eagle1_of_its_authors_drafts_what_its_folder_says(tmp_path: Path) -> None:
    config, tensors = eagle1()
    made = imported(tmp_path / "theirs", config, dict(tensors), pickled=True)
    assert read_description(tmp_path / "out")["drafter"]["bias"] is True
    tokens, host = text(9), target().model
    features = host.model(tokens[None]).last_hidden_state[0]
    made.reset(tokens[0])
    made.observe(Observation(tokens[1:], features[:-1]))
    drafted = made.draft(Frontier.root(torch.device("cpu"))).logits[0, 0]
    blocks = LlamaModel(LlamaConfig(**{**config, "num_hidden_layers": 2}))
    blocks.layers[0].input_layernorm = blocks.norm = torch.nn.Identity()
    rest = {name: each for name, each in tensors.items() if name.startswith("layers.")}
    assert not blocks.load_state_dict(rest, strict=False).unexpected_keys
    joined = torch.cat([host.get_input_embeddings().weight[tokens[1:]], features[:-1]], dim=-1)
    rows = functional.linear(joined, tensors["fc.weight"], tensors["fc.bias"])
    hidden = blocks(inputs_embeds=rows[None]).last_hidden_state[0, -1]
    expected = host.get_output_embeddings().weight @ hidden
    torch.testing.assert_close(drafted, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (tensor_with("norm.weight", 32), "holds norm.weight"),
        (tensor_with("layers.0.input_layernorm.weight", 32), "input_layernorm"),
        (config_with(rope_theta=5e5), "base 500000"),
        (config_with(rms_norm_eps=1e-3), "rms_norm_eps"),
    ],
)
def test_what_eagle1_of_ours_does_not_compute_is_refused(
    tmp_path: Path, change: Change, said: str
) -> None:
    config, tensors = eagle1()
    change(config, tensors)
    with pytest.raises(FalconLabError, match=said):
        imported(tmp_path / "theirs", config, tensors)
