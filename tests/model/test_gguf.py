"""GGUF files become folders in the cache, once, with the numbers that they stand for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from falcon_lab.config.schema import TargetConfig
from falcon_lab.data.dialogues import ChatForm
from falcon_lab.data.documents import Document, render
from falcon_lab.errors import FalconLabError
from falcon_lab.model.loading import load_target
from falcon_lab.testing import plain_text
from gguf_files import CHAT, KINDS, OTHERS, TEXTS, gguf, tokenizer, write_gguf

TOKENS = torch.arange(5, 25)[None]
CPU = TargetConfig(device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "targets"


def load(path: Path, **keys: Any) -> tuple[Any, list[str]]:
    """The target of a file, and what was announced."""
    said: list[str] = []
    return load_target(replace(CPU, name=str(path), **keys), said.append), said


def refusal(path: Path) -> str:
    with pytest.raises(FalconLabError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_has_the_logits_of_what_its_blocks_stand_for(
    tmp_path: Path, kind: str
) -> None:
    stands_for = write_gguf(tmp_path / "model.gguf", kind)
    target, _ = load(tmp_path / "model.gguf", dtype="float32")
    with torch.no_grad():
        assert torch.equal(target.model(TOKENS).logits, stands_for(TOKENS).logits)


def test_so_has_one_of_types_that_are_read_alone(tmp_path: Path) -> None:
    """Such as Q4_K, which most files have: a layer of each, of any blocks."""
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"} <= set(OTHERS)
    expected = write_gguf(tmp_path / "model.gguf", OTHERS).state_dict()
    found = load(tmp_path / "model.gguf", dtype="float32")[0].model.state_dict()
    assert found.keys() == expected.keys()
    for layer, kind in enumerate(OTHERS):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert expected[name].isfinite().all(), kind
        assert expected[name].count_nonzero() > 0, kind
        assert torch.equal(found[name], expected[name]), kind


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "float32")]
)
def test_the_checkpoints_own_type_is_the_files_and_float32_where_it_is_quantised(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    write_gguf(tmp_path / "model.gguf", kind)
    assert load(tmp_path / "model.gguf")[0].dtype is getattr(torch, dtype)
    assert load(tmp_path / "model.gguf", dtype="bfloat16")[0].dtype is torch.bfloat16


def test_greedy_text_tokens_and_chats_are_those_of_the_model_that_transformers_reads(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "model.gguf", "Q4_1")
    target, _ = load(tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    prompt = target.tokenizer(TEXTS[0])["input_ids"]
    assert prompt == tokenizer()(TEXTS[0])["input_ids"]
    written = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert plain_text(target, prompt, 12) == written[0, len(prompt) :].tolist()
    assert target.eos_ids == {tokenizer().eos_token_id}
    assert target.tokenizer.chat_template == CHAT


def test_a_file_is_converted_once_and_again_when_its_content_changes(
    tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    first, said = load(path)
    [line] = said
    assert "converting it once" in line
    assert str(cache) in line
    (tmp_path / "other").mkdir()
    moved = path.rename(tmp_path / "other" / "model.GGUF")
    again, said = load(moved, dtype="bfloat16")
    assert said == []
    assert again.fingerprint == first.fingerprint
    assert (first.name, again.name) == (str(path), str(moved))
    write_gguf(path, "Q4_0")
    other, said = load(path)
    assert len(said) == 1
    assert other.fingerprint != first.fingerprint


def test_a_folder_that_is_not_whole_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    load(path)
    [folder] = (each for each in cache.iterdir() if each.is_dir())
    assert not any(file.is_symlink() for file in folder.iterdir())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert len(load(path)[1]) == 1
    (folder / "tokenizer.json").unlink()
    assert len(load(path)[1]) == 1
    assert load(path)[1] == []


def test_what_lies_beside_the_file_is_not_looked_at(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text('{"model_type": "bert"}')
    assert load(tmp_path / "model.gguf")[0].tokenizer.chat_template == CHAT


def add(key: str, value: Any) -> Callable[[Any], None]:
    """A change of what ``write_gguf`` says in the header."""

    def change(writer: Any) -> None:
        for values in writer.kv_data:
            values.pop(key, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)

    return change


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "mamba9", "architecture 'mamba9'"),
        ("general.architecture", "bert", "architecture 'bert'"),
        ("general.architecture", None, "no general.architecture"),
        ("tokenizer.ggml.tokens", None, "no tokenizer"),
        ("tokenizer.ggml.model", None, "no tokenizer"),
        ("tokenizer.ggml.model", "words", "'words'"),
        ("tokenizer.ggml.merges", None, "cannot read this model"),
        ("split.count", 3, "one of 3 parts"),
        ("llama.block_count", 10**6, "1000000 layers"),
        ("llama.block_count", 3, "lacks weights"),
        ("llama.block_count", "two", "'two' layers"),
        ("llama.feed_forward_length", 2**30, "weights and has"),
        ("llama.feed_forward_length", 128, "cannot read this model"),
        ("llama.embedding_length", 2**30, "weights and has"),
        ("llama.embedding_length", None, "weights"),
        ("llama.attention.head_count", 0, "cannot read this model"),
        ("general.alignment", 0, "aligned"),
    ],
)
def test_a_header_that_is_no_models_is_refused_in_a_line(
    tmp_path: Path, cache: Path, key: str, value: Any, said: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=add(key, value))
    message = refusal(path)
    assert said in message
    assert str(path) in message
    assert not any(each.is_dir() for each in cache.glob("*"))


def test_a_chat_that_needs_a_template_says_so_where_the_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, change=add("tokenizer.chat_template", None))
    target, _ = load(path)
    chat = Document("1", messages=[{"role": "user", "content": "Hello"}], source="chats.jsonl:1")
    with pytest.raises(FalconLabError, match=r"chats\.jsonl:1.*data\.chat_template"):
        render(chat, target.tokenizer)
    with pytest.raises(FalconLabError, match=r"no chat template.*data\.chat_template"):
        ChatForm.of(target)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_1, 36, 200])
def test_a_type_that_cannot_be_read_is_named(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    content, name = path.read_bytes(), b"token_embd.weight"
    place = content.index(name) + len(name) + 4 + 16  # behind the shape
    path.write_bytes(content[:place] + int(kind).to_bytes(4, "little") + content[place + 4 :])
    assert "token_embd.weight" in refusal(path)


def test_a_file_that_ends_in_its_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-5000])
    assert "cut off" in refusal(path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install {package}" in refusal(tmp_path / "model.gguf")


def test_a_transformers_that_reads_other_tokenizers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr("falcon_lab.model.gguf.version", lambda package: "5.0.0")
    assert "pip install 'transformers>=5.20'" in refusal(tmp_path / "model.gguf")


def test_a_cache_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert "FALCON_LAB_CACHE" in refusal(tmp_path / "model.gguf")


def test_a_name_that_leads_to_no_file_is_refused(tmp_path: Path) -> None:
    assert "nowhere.gguf" in refusal(tmp_path / "nowhere.gguf")


def test_a_folder_that_has_such_files_alone_leads_to_one_of_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert f"target.name={tmp_path / 'model.gguf'}" in refusal(tmp_path)


def test_a_draft_model_may_be_one_too(tmp_path: Path) -> None:
    """Whoever loads a model by ``load_target`` may name a file; its suffix is not looked at."""
    write_gguf(tmp_path / "blob")
    assert load(tmp_path / "blob")[0].vocab_size == len(tokenizer())
