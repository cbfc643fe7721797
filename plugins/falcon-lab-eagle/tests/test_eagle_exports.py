from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import KNOWN, target, text
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

from falcon_lab import testing
from falcon_lab.drafters.saved import save_as
from falcon_lab.errors import FalconLabError
from falcon_lab.export.folder import Export, import_drafter, read_exported, read_origin
from falcon_lab.export.mapping import IDS
from falcon_lab.interfaces import Exported, Frontier, Observation
from falcon_lab.model.target import Target

FORMATS = ("vllm", "speculators", "sglang", "openvino")
NODES: dict[str, dict[str, Any]] = {
    "target's head": {"name": "eagle3"},
    "own head": {"name": "eagle3", "taps": [1, 2, 3], "head": "own"},
    "draft vocabulary": {"name": "eagle3", "draft_vocabulary": 9},
    "both": {"name": "eagle3", "draft_vocabulary": 9, "head": "own"},
    "sizes of its own": {
        **{"name": "eagle3", "heads": 2, "groups": 1, "head_size": 8, "intermediate": 24},
        **{"eps": 1e-2, "rope_base": 500.0, "norm_before_residual": True},
    },
}


def saved(folder: Path, node: dict[str, Any]) -> Any:
    """A drafter with moved weights, and its folder."""
    return testing.save_for_export(folder, target(), node, KNOWN)


def exported(folder: Path, name: str, out: Path) -> Export:
    """A drafter's folder as a format, written."""
    made = Export.of(folder, name, target(), "org/target", KNOWN, 4)
    made.write(out)
    return made


def node_for(name: str, node: str) -> dict[str, Any]:
    """A drafter of the format's own form: OpenVINO has no norm before the residual."""
    return {**NODES[node], "norm_before_residual": False} if name == "openvino" else NODES[node]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_imported_is_what_was_exported_bit_for_bit(
    tmp_path: Path, name: str, node: str
) -> None:
    testing.check_export(tmp_path, target(), node_for(name, node), name, KNOWN)


class Reader:
    """EAGLE-3 as engines compute it, from a folder and the target's tables alone.

    A chain's first pass over a whole text, without a cache.
    """

    def __init__(
        self, exported: Exported, layer: str = "midlayer", of: Target | None = None
    ) -> None:
        self.host = (of or target()).model
        self.config = {**exported.config, **exported.config.get("transformer_layer_config", {})}
        self.weights, self.layer = exported.tensors, layer

    def norm(self, name: str, rows: Tensor) -> Tensor:
        scale = (rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return rows * scale * self.weights[f"{name}.weight"]

    def product(self, name: str, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weights[f"{name}.weight"])

    def turned(self, rows: Tensor) -> Tensor:
        """Rotary embeddings of ``[heads, T, D]``."""
        half = rows.shape[-1] // 2
        powers = -torch.arange(half) / half
        angles = torch.arange(rows.shape[1])[:, None] * self.config["rope_theta"] ** powers
        pairs = torch.complex(rows[..., :half], rows[..., half:])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def heads(self, name: str, rows: Tensor) -> Tensor:
        return (
            self.product(f"{self.layer}.self_attn.{name}", rows)
            .unflatten(-1, (-1, self.config["head_dim"]))
            .transpose(0, 1)
        )

    def logits(self, tokens: Tensor, layers: Tensor) -> Tensor:
        """Of the tokens after the last, ``[V]``, by ``[T]`` tokens and ``[T, 3, H]`` layers."""
        host, layer = self.host, self.layer
        embedded = host.get_input_embeddings().weight[tokens]
        hidden = self.product("fc", layers.flatten(1))
        rows = [
            self.norm(f"{layer}.input_layernorm", embedded),
            self.norm(f"{layer}.hidden_norm", hidden),
        ]
        both = torch.cat(rows, dim=-1)
        query, key = (self.turned(self.heads(name, both)) for name in ("q_proj", "k_proj"))
        seen = functional.scaled_dot_product_attention(
            query, key, self.heads("v_proj", both), is_causal=True, enable_gqa=True
        )
        residual = rows[1] if self.config.get("norm_before_residual") else hidden
        attended = self.product(f"{layer}.self_attn.o_proj", seen.transpose(0, 1).flatten(1))
        hidden = residual + attended
        inner = self.norm(f"{layer}.post_attention_layernorm", hidden)
        gate = functional.silu(self.product(f"{layer}.mlp.gate_proj", inner))
        up = self.product(f"{layer}.mlp.up_proj", inner)
        hidden = self.norm("norm", hidden + self.product(f"{layer}.mlp.down_proj", gate * up))
        table = self.weights.get("lm_head.weight", host.get_output_embeddings().weight)
        logits, offsets = hidden[-1] @ table.T, self.weights.get("d2t")
        if offsets is None:
            return logits
        spread = torch.full((host.config.vocab_size,), -torch.inf)
        return spread.index_copy(0, torch.arange(len(offsets)) + offsets, logits)


def layer_ids(config: dict[str, Any]) -> list[int]:
    """The layers that an engine gives, as it numbers what layers put out (0: the embeddings)."""
    if "hidden_layers_list" in config:
        return [i + 1 for i in config["hidden_layers_list"]]
    if "eagle_config" in config:
        return [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    found: list[int] = config["eagle_aux_hidden_state_layer_ids"]
    return found


def drafted_by_an_engine(found: Exported, tokens: Tensor, *, off: int = 0) -> Tensor:
    states = target().model(tokens[None], output_hidden_states=True).hidden_states
    layers = torch.stack([states[i + off][0] for i in layer_ids(found.config)], dim=1)
    layer = "layers.0" if "speculators_config" in found.config else "midlayer"
    return Reader(found, layer).logits(tokens[1:], layers[:-1])


@pytest.mark.parametrize("node", ["target's head", "both", "sizes of its own"])
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_a_reader_that_knows_the_folder_alone_drafts_the_same(
    tmp_path: Path, name: str, node: str
) -> None:
    made = saved(tmp_path / "drafter", node_for(name, node)).eval()
    exported(tmp_path / "drafter", name, tmp_path / "out")
    tokens = text(9)
    states = target().model(tokens[None], output_hidden_states=True).hidden_states
    taps = torch.stack([states[tap][0] for tap in made.taps], dim=1)
    made.reset(tokens[0])
    made.observe(Observation(tokens[1:], None, taps=taps[:-1]))
    drafted = made.draft(Frontier.root(torch.device("cpu")))
    logits = drafted.logits[0, 0]
    if drafted.vocabulary is not None:
        logits = drafted.vocabulary.spread(logits, -torch.inf)
    found = read_exported(tmp_path / "out")
    torch.testing.assert_close(drafted_by_an_engine(found, tokens), logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(drafted_by_an_engine(found, tokens, off=-1), logits, atol=1e-2)


@pytest.mark.parametrize("name", FORMATS)
def test_layer_ids_that_are_off_by_one_are_found(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "drafter", NODES["target's head"])
    made = exported(tmp_path / "drafter", name, tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    ids = made.form.write(made.trained).config
    ids = ids.get("eagle_config", ids)
    ids = ids.get("hidden_layers_list") or ids["eagle_aux_hidden_state_layer_ids"]
    wrong = [each + 1 for each in ids]
    compact = config.read_text().replace(" ", "").replace("\n", "")
    listed = ",".join(map(str, ids))
    assert f"[{listed}]" in compact
    config.write_text(compact.replace(f"[{listed}]", f"[{','.join(map(str, wrong))}]"))
    [line] = made.differences(tmp_path / "out")
    assert "layer" in line
    assert str(ids) in line
    origin = read_origin(tmp_path / "out")
    with pytest.raises(FalconLabError, match="layer"):
        import_drafter(tmp_path / "out", origin, tmp_path / "back", target(), KNOWN)


@pytest.mark.parametrize(
    ("name", "taps", "said"),
    [
        ("vllm", [1, 3], "reads 3 of them"),
        ("speculators", [0, 1, 2, 3], "reads 3 of them"),
        ("vllm", [3, 1, 2], "ascending"),
        ("sglang", [0, 1, 2], "embeddings"),
        ("openvino", [0, 1, 2], "embeddings"),
    ],
)
def test_taps_that_a_format_cannot_say_are_refused(
    tmp_path: Path, name: str, taps: list[int], said: str
) -> None:
    saved(tmp_path / "drafter", {"name": "eagle3", "taps": taps})
    with pytest.raises(FalconLabError, match=said):
        exported(tmp_path / "drafter", name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_openvino_is_given_the_target_s_tables_and_a_map_of_all_tokens(tmp_path: Path) -> None:
    """Its exporter holds tensors of these names, and leaves those that are missing random."""
    saved(tmp_path / "drafter", NODES["target's head"])
    exported(tmp_path / "drafter", "openvino", tmp_path / "out")
    found, host = read_exported(tmp_path / "out"), target().model
    table, head = host.get_input_embeddings().weight, host.get_output_embeddings().weight
    assert torch.equal(found.tensors["embed_tokens.weight"], table)
    assert torch.equal(found.tensors["lm_head.weight"], head)
    assert torch.equal(found.tensors["d2t"], torch.zeros(len(table), dtype=torch.long))
    assert bool(found.tensors["t2d"].all())
    assert found.config["draft_vocab_size"] == len(table)


def test_a_norm_before_the_residual_is_refused_for_openvino(tmp_path: Path) -> None:
    saved(tmp_path / "drafter", NODES["sizes of its own"])
    with pytest.raises(FalconLabError, match="norm_before_residual=false"):
        exported(tmp_path / "drafter", "openvino", tmp_path / "out")


def test_a_target_that_scales_its_embeddings_is_refused(tmp_path: Path) -> None:
    gemma = testing.tiny_target("gemma3", vocab=12, layers=4)
    testing.save_for_export(tmp_path / "d", gemma, {"name": "eagle3"}, KNOWN)
    export = Export.of(tmp_path / "d", "vllm", gemma, "org/target", KNOWN, 4)
    with pytest.raises(FalconLabError, match="scales"):
        export.write(tmp_path / "out")


def test_tied_tables_of_the_target_are_written_twice(tmp_path: Path) -> None:
    tied = testing.tiny_target("qwen2", vocab=12, layers=4)
    tied.model.config.tie_word_embeddings = True
    tied.model.lm_head.weight = tied.model.model.embed_tokens.weight
    testing.check_export(tmp_path, tied, {"name": "eagle3"}, "speculators", KNOWN)


@pytest.mark.parametrize("name", ["vllm", "speculators"])
def test_rows_of_the_lm_head_keep_the_target_s_precision(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "drafter", NODES["draft vocabulary"])
    assert save_as(tmp_path / "drafter", "bfloat16")
    made = exported(tmp_path / "drafter", name, tmp_path / "out")
    ids, rows = made.trained.tensors[IDS], target().model.get_output_embeddings().weight
    assert torch.equal(read_exported(tmp_path / "out").tensors["lm_head.weight"], rows[ids])


def test_a_folder_that_was_copied_in_part_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "drafter", NODES["own head"])
    exported(tmp_path / "drafter", "vllm", tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-20])
    with pytest.raises(FalconLabError, match=r"safetensors is not whole"):
        read_origin(tmp_path / "out")
    weights.unlink()
    with pytest.raises(FalconLabError, match=r"safetensors is missing"):
        read_origin(tmp_path / "out")


PUBLISHED = {"name": "eagle", "form": "published", "layers": 2}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@torch.no_grad()
def test_eagle_as_published_comes_back_and_is_what_engines_compute(
    tmp_path: Path, name: str
) -> None:
    """By transformers' own blocks, called as vLLM and SGLang call theirs."""
    made = testing.check_export(tmp_path, target(), PUBLISHED, name, KNOWN).trained.drafter
    found, tokens, host = read_exported(tmp_path / "out"), text(9), target().model
    features = host.model(tokens[None]).last_hidden_state[0]
    made.reset(tokens[0])
    made.observe(Observation(tokens[1:], features[:-1]))
    drafted = made.draft(Frontier.root(torch.device("cpu"))).logits[0, 0]
    config = LlamaConfig(**found.config, attn_implementation="eager")
    blocks = LlamaModel(config)
    blocks.layers[0].input_layernorm = blocks.norm = torch.nn.Identity()
    weights = {k: v for k, v in found.tensors.items() if not k.startswith("fc.")}
    result = blocks.load_state_dict(weights, strict=False)
    assert result.missing_keys == ["embed_tokens.weight"]
    assert not result.unexpected_keys
    joined = torch.cat([host.get_input_embeddings().weight[tokens[1:]], features[:-1]], dim=-1)
    rows = functional.linear(joined, found.tensors["fc.weight"], found.tensors.get("fc.bias"))
    hidden = blocks(inputs_embeds=rows[None]).last_hidden_state[0, -1]
    logits = host.get_output_embeddings().weight @ hidden
    torch.testing.assert_close(logits, drafted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"form": "full"}, "form=published"), ({"draft_vocabulary": 9}, "draft_vocabulary=null")],
)
def test_eagle_that_engines_do_not_know_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    saved(tmp_path / "drafter", {**PUBLISHED, **options})
    with pytest.raises(FalconLabError, match=said):
        exported(tmp_path / "drafter", "vllm", tmp_path / "out")
