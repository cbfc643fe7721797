"""The fingerprint moves with what a drafter depends on, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from falcon_lab.model.fingerprint import fingerprint
from tiny_models import FAMILIES, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_precision_is_the_same_target(dtype: torch.dtype) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    assert fingerprint(model, tokenizer) == fingerprint(model.to(dtype), tokenizer)


def test_the_attention_kernel_and_the_place_it_came_from_do_not_count() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    before = fingerprint(model, tokenizer)
    model.set_attn_implementation("eager")
    model.config.name_or_path = "elsewhere"
    model.config.transformers_version = "9.9.9"
    assert fingerprint(model, tokenizer) == before


def test_families_seeds_shapes_and_vocabularies_are_told_apart() -> None:
    made = [fingerprint(tiny_model(family), tiny_tokenizer()) for family in FAMILIES]
    made.append(fingerprint(tiny_model("llama", seed=1), tiny_tokenizer()))
    made.append(fingerprint(tiny_model("llama", layers=3), tiny_tokenizer()))
    made.append(fingerprint(tiny_model("llama"), tiny_tokenizer(63)))
    assert len(set(made)) == len(made)


def test_a_weight_and_what_weights_do_not_tell_both_count() -> None:
    tokenizer = tiny_tokenizer()
    made = {fingerprint(tiny_model("llama"), tokenizer)}
    trained = tiny_model("llama")
    with torch.no_grad():
        trained.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    made.add(fingerprint(trained, tokenizer))
    rotated = tiny_model("llama")
    rotated.config.rope_parameters["rope_theta"] = 500000.0
    made.add(fingerprint(rotated, tokenizer))
    narrow = tiny_model("mistral")
    before = fingerprint(narrow, tokenizer)
    narrow.config.sliding_window = 5
    assert fingerprint(narrow, tokenizer) != before
    assert len(made) == 3
