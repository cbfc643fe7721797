from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sps_cases import KNOWN, POSITIONS, VOCAB, target
from transformers import AutoModelForCausalLM

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.export.folder import Export
from falcon_lab.model.masks import causal_mask

FRESH = {"name": "sps", "layers": 1}


@pytest.mark.parametrize(("family", "name"), [("llama", "vllm"), ("gpt2", "transformers")])
@torch.no_grad()
def test_the_folder_is_a_model_that_computes_the_same(
    tmp_path: Path, family: str, name: str
) -> None:
    host = testing.tiny_target(family, vocab=VOCAB, positions=POSITIONS)
    made = testing.check_export(tmp_path, host, FRESH, name, KNOWN).trained.drafter
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    positions = torch.arange(5)[None]
    hidden = made.model(tokens=tokens, positions=positions, mask=causal_mask(5, 0, tokens.device))
    torch.testing.assert_close(model(tokens).logits, made.model.logits(hidden)[..., :VOCAB])


def test_a_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    node = {**FRESH, "draft_vocabulary": 9}
    testing.save_for_export(tmp_path / "drafter", target(), node, KNOWN)
    export = Export.of(tmp_path / "drafter", "vllm", target(), "org/target", KNOWN, 4)
    with pytest.raises(FalconLabError, match="draft_vocabulary=null"):
        export.write(tmp_path / "out")
