"""Loading any causal LM from a folder, and the one line that says why something is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.model.loading import load_target, refuse_unfit, resolve_device
from falcon_lab.model.target import Target
from tiny_models import FAMILIES, save_tiny, tiny_model, tiny_target, tiny_tokenizer

CPU = TargetConfig(device="cpu")


def load(folder: Path | str, **keys: str) -> Target:
    return load_target(dataclasses.replace(CPU, name=str(folder), **keys))


def refused(folder: Path | str = "", **keys: str) -> str:
    """The message, which must be one line."""
    with pytest.raises(FalconLabError) as caught:
        load(keys.pop("name", folder), **keys)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def features(target: Target) -> Tensor:
    tokens = torch.arange(2, 12)[None]
    return target.teacher(tokens, torch.zeros_like(tokens), torch.arange(10)[None])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_as_it_was_saved(family: str, attention: str, tmp_path: Path) -> None:
    made = tiny_target(family, attention=attention)
    target = load(save_tiny(tmp_path, family), attention=attention)
    assert torch.equal(features(target), features(made))
    assert target.fingerprint == made.fingerprint
    assert target.backbone.implementation == attention


def test_sharded_weights_load_like_one_file(tmp_path: Path) -> None:
    whole = load(save_tiny(tmp_path / "whole"))
    folder = save_tiny(tmp_path / "shards", shard="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(features(load(folder)), features(whole))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_embeddings_load_with_one_table(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    if family == "llama":
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.model.get_output_embeddings().weight is (
        target.model.get_input_embeddings().weight
    )


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float32, torch.float32),
        ("float32", torch.bfloat16, torch.float32),
        ("float16", torch.float32, torch.float16),
        ("float64", torch.float32, torch.float64),
    ],
)
def test_dtype_auto_is_the_checkpoints_own(
    asked: str, stored: torch.dtype, expected: torch.dtype, tmp_path: Path
) -> None:
    tiny_model("llama").to(stored).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load(tmp_path, dtype=asked)
    assert target.dtype == expected
    assert features(target).dtype == expected


def test_a_checkpoint_has_one_fingerprint_in_every_dtype(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    made = {load(folder, dtype=d).fingerprint for d in ("float32", "bfloat16", "float64")}
    assert len(made) == 1


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'} cannot be loaded: no folder of that name" in message


def test_a_hub_id_that_cannot_be_reached_is_named() -> None:
    assert refused("someone/some-model").startswith(
        "target someone/some-model cannot be loaded: no folder of that name, and as a hub id: "
    )


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = save_tiny(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is cut short or corrupt" in refused(tmp_path)


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    path = save_tiny(tmp_path) / "model.safetensors"
    path.write_bytes(b"\xff" * 64)
    assert f"{path} is cut short or corrupt" in refused(tmp_path)


def test_the_shard_that_is_broken_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard="10KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:50])
    assert f"{shard} is cut short or corrupt" in refused(tmp_path)
    shard.unlink()
    assert f"{shard} is missing" in refused(tmp_path)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard="10KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": ', "utf-8")
    assert f"{index}: no index of weights" in refused(tmp_path)


@pytest.mark.parametrize("names", ["[]", "[1]", '{"a": 1}', '{"a": {}}', '{"a": "../b"}', "null"])
def test_an_index_that_names_no_files_beside_it_is_named(names: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, shard="10KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {names}}}', "utf-8")
    assert f"{index}: no index of weights" in refused(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 3),
        ("architectures", [1]),
        ("architectures", "LlamaForCausalLM"),
        ("sliding_window", "abc"),
        ("sliding_window", [1]),
        ("layer_types", {"a": 1}),
        ("num_hidden_layers", "two"),
        ("num_hidden_layers", 10_000_000),
        ("vocab_size", 10**12),
        ("model_type", "t5"),
        ("model_type", "homemade"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
    ],
)
def test_what_a_stranger_s_configuration_may_hold_is_refused_in_a_line(
    key: str, value: object, tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    edit(tmp_path / "config.json", **{key: value})
    assert str(tmp_path) in refused(tmp_path)


@pytest.mark.parametrize("ids", ["x", [1, "a"], {"a": 1}, [[1]], 1.5])
def test_an_end_that_is_no_token_is_refused(ids: object, tmp_path: Path) -> None:
    edit(save_tiny(tmp_path) / "generation_config.json", eos_token_id=ids)
    assert "eos_token_id is" in refused(tmp_path)


def test_weights_of_another_shape_than_the_configuration_s_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tiny_model("llama", hidden=16).save_pretrained(tmp_path / "other")
    (tmp_path / "other/model.safetensors").replace(tmp_path / "model.safetensors")
    assert "other shapes than its config.json says" in refused(tmp_path)


def test_a_large_configuration_beside_small_weights_is_refused_before_it_is_made(
    tmp_path: Path,
) -> None:
    edit(save_tiny(tmp_path) / "config.json", vocab_size=4_000_000)
    assert "describes 2560" in refused(tmp_path)


def test_a_folder_without_safetensors_says_that_pickles_are_not_read(tmp_path: Path) -> None:
    (save_tiny(tmp_path) / "model.safetensors").unlink()
    assert "has no safetensors weights; save" in refused(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "pickled ones are not read" in refused(tmp_path)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (save_tiny(tmp_path) / "config.json").write_text('{"model_type": "lla', "utf-8")
    assert f"target {tmp_path} cannot be loaded" in refused(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_of_the_base_model_alone_is_refused(family: str, tmp_path: Path) -> None:
    tiny_model(family).base_model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "has no LM head: it is a " in refused(tmp_path)


def test_a_checkpoint_without_its_head_is_refused_whatever_it_calls_itself(tmp_path: Path) -> None:
    tiny_model("llama").base_model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    assert "lacks weights: lm_head.weight" in refused(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=32, **shape)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "has no LM head: it is a BertForMaskedLM" in refused(tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(vocab_size=64, d_model=32).save_pretrained(tmp_path)
    assert "has no LM head: it is a t5" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "qwen3_next", "jamba", "recurrent_gemma"])
def test_recurrent_and_hybrid_models_are_refused(kind: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(FalconLabError, match="tree of drafts cannot be verified through"):
        refuse_unfit(dataclasses.replace(CPU, name=kind), AutoConfig.for_model(kind))


def test_capped_attention_scores_are_refused_on_sdpa_which_drops_the_cap() -> None:
    from transformers import Gemma2Config

    config = dataclasses.replace(CPU, name="gemma-2", attention="sdpa")
    with pytest.raises(FalconLabError, match=r"set target\.attention=eager"):
        refuse_unfit(config, Gemma2Config())
    refuse_unfit(dataclasses.replace(config, attention="eager"), Gemma2Config())


def test_code_from_the_repository_is_never_run(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit(
        tmp_path / "config.json",
        model_type="homemade",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')", "utf-8")
    assert "needs code from its repository, which is never run" in refused(tmp_path)


def test_a_family_without_sdpa_is_sent_to_eager_and_loads_there(tmp_path: Path) -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    shape = {"n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    ends = {"bos_token_id": None, "eos_token_id": 0}
    GPTJForCausalLM(GPTJConfig(vocab_size=64, n_embd=32, **shape, **ends)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "does not support sdpa; set target.attention=eager" in refused(tmp_path)
    assert load(tmp_path, attention="eager").max_positions == 64


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert f"target {tmp_path} has no tokenizer that can be read" in refused(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (save_tiny(tmp_path) / "tokenizer.json").write_text("{", "utf-8")
    assert "has no tokenizer that can be read" in refused(tmp_path)


def test_the_tokenizer_of_a_larger_model_is_refused_with_both_sizes(tmp_path: Path) -> None:
    save_tiny(tmp_path, vocab=64)
    tiny_tokenizer(90).save_pretrained(tmp_path)
    assert "token 89 (90 entries) and the model knows 64" in refused(tmp_path)


def test_a_tokenizer_smaller_than_a_padded_vocabulary_is_fine(tmp_path: Path) -> None:
    save_tiny(tmp_path, vocab=64)
    tiny_tokenizer(50).save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.vocab_size == 64


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dtype", "flaot32", "target.dtype is 'flaot32'; choose one of auto, float32"),
        ("attention", "flash", "target.attention is 'flash'; choose one of sdpa, eager"),
        ("device", "gpu", "target.device is 'gpu'; say auto, cpu, cuda or cuda:N"),
        ("device", "cuda:99", "target.device is 'cuda:99', and torch sees"),
        ("device", "mps", "target.device is 'mps'; say auto, cpu, cuda or cuda:N"),
        ("name", "x" * 300, "x" * 300 + ": cannot be read"),
    ],
)
def test_a_misspelt_choice_is_named_with_its_key(key: str, value: str, said: str) -> None:
    assert refused(**({"folder": "anything"} | {key: value})).startswith(said)


def test_the_device_auto_is_one_that_torch_has() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == expected
