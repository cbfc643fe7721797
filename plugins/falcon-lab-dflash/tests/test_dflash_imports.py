"""Heads of other programs: folders by their names and keys, without a word of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import KNOWN, target
from safetensors.torch import save_file
from torch import Tensor

from falcon_lab import testing
from falcon_lab.config.saved import read_description
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.export.strangers import import_strangers

HIDDEN, WIDE, HEAD, VOCAB = 32, 40, 16, 12
SHAPES = {
    "self_attn.q_proj": (2 * HEAD, HIDDEN),
    "self_attn.k_proj": (HEAD, HIDDEN),
    "self_attn.v_proj": (HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 2 * HEAD),
    "self_attn.q_norm": (HEAD,),
    "self_attn.k_norm": (HEAD,),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 4,
    "dflash_config": {"mask_token_id": 11, "target_layer_ids": [0, 1]},
    "attention_bias": False,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "layer_types": ["full_attention"],
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "num_target_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}


def published() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {f"layers.0.{name}": shape for name, shape in SHAPES.items()}
    shapes |= {"fc": (HIDDEN, 2 * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    return {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}


def imported(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    import_strangers(path, path.with_name("out"), target(), KNOWN, None)
    return load_drafter(path.with_name("out"), target(), KNOWN)


def test_a_published_head_is_read_with_its_mask_out_of_the_target_s_table(tmp_path: Path) -> None:
    made = imported(tmp_path / "theirs", CONFIG, published())
    assert (made.block, made.taps, made.model.shape.groups) == (3, (1, 2), 1)
    assert torch.equal(made.mask.detach(), target().embed(torch.tensor(11)))
    node = read_description(tmp_path / "out")["drafter"]
    assert (node["eps"], node["rope_base"]) == (1e-6, 1e6)
    norms = [each for each in made.modules() if isinstance(each, torch.nn.RMSNorm)]
    assert {each.eps for each in norms} == {1e-6}
    rotation = made.model.rotation(torch.tensor([[1]]))
    torch.testing.assert_close(rotation.cosine[0, 0, 0, 1], torch.tensor(1e6 ** (-1 / 8)).cos())
    rounds = testing.lossless_rounds(testing.engine(target(), made, components=KNOWN), [[1, 2, 3]])
    assert rounds


def test_a_folder_of_speculators_has_layers_as_ours_and_the_mask_above(tmp_path: Path) -> None:
    inner = {k: v for k, v in CONFIG.items() if k not in ("dflash_config", "block_size")}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": inner}
    config |= {"block_size": 4, "mask_token_id": 11, "aux_hidden_state_layer_ids": [1, 2]}
    tensors = published()
    tensors |= {"lm_head.weight": target().model.get_output_embeddings().weight.half()}
    assert imported(tmp_path / "theirs", config, tensors).taps == (1, 2)


@pytest.mark.parametrize("node", [{"taps": [1, 2]}, {"draft_vocabulary": 9, "eps": 1e-5}])
def test_an_export_that_nobody_knows_for_ours_is_the_same_drafter(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    given = {"name": "dflash", "block": 2, "layers": 1, "eps": torch.finfo(torch.float32).eps}
    testing.check_import(tmp_path, target(), {**given, **node}, "vllm", KNOWN)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"num_target_layers": 36}, "num_target_layers: 36"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"dflash_config": {"mask_token_id": 11}}, "taps are unknown"),
        ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 1]}}, "99"),
        (
            {"dflash_config": {**CONFIG["dflash_config"], "causal": True}},
            "causal: True",
        ),
    ],
)
def test_what_dflash_of_ours_does_not_compute_is_refused(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(FalconLabError, match=said):
        imported(tmp_path / "theirs", {**CONFIG, **keys}, published())


def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    strange = {"selector.weight": torch.ones(2)}
    with pytest.raises(FalconLabError, match=r"holds selector\.weight"):
        imported(tmp_path / "theirs", CONFIG, {**published(), **strange})


def test_a_mask_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mask_embedding.pt").write_bytes(b"abc")
    with pytest.raises(FalconLabError, match=r"mask_embedding\.pt"):
        imported(tmp_path / "theirs", CONFIG, published())
