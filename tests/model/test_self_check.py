"""A target that our masks or head do not fit is found out with a few tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.model.self_check import check_target
from falcon_lab.model.target import Target
from tiny_models import FAMILIES, tiny_target, tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_every_precision(family: str, dtype: torch.dtype) -> None:
    target = tiny_target(family)
    target.model.to(dtype)
    check_target(target)


def test_an_unknown_scale_on_the_logits_is_found() -> None:
    target = tiny_target("llama")
    head = target.model.lm_head

    def double(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return 2 * logits

    target.model.lm_head = torch.nn.Linear(32, 64, bias=False)  # the target has the one before
    target.model.lm_head.weight = head.weight
    target.model.lm_head.register_forward_hook(double)
    with pytest.raises(FalconLabError, match=r"its LM head on our features .*off by 50\.0%"):
        check_target(target)


def test_a_model_that_sees_both_ways_is_found() -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    target = Target(BertLMHeadModel(config), tiny_tokenizer(), name="both-ways")
    with pytest.raises(FalconLabError, match=r"both-ways \(bert\) cannot be a target"):
        check_target(target)


def test_a_tree_mask_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    read = target.backbone.forward

    def blind(*, mask: torch.Tensor | None, **arguments: Any) -> torch.Tensor:
        return read(mask=None if mask is None else torch.ones_like(mask).tril(), **arguments)

    monkeypatch.setattr(target.backbone, "forward", blind)
    with pytest.raises(FalconLabError, match="a verified tree of drafts gives other logits"):
        check_target(target)


def test_broken_numbers_are_found() -> None:
    target = tiny_target("llama")
    with torch.no_grad():
        target.model.lm_head.weight[5] = float("nan")
    with pytest.raises(FalconLabError, match="cannot be a target"):
        check_target(target)


def test_a_model_with_alibi_in_place_of_positions_is_refused_with_the_reason() -> None:
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    target = Target(MptForCausalLM(config), tiny_tokenizer(), name="tiny-mpt")
    with pytest.raises(FalconLabError, match=r"tiny-mpt \(mpt\) cannot be a target"):
        check_target(target)
