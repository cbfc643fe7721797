from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sps_cases import KNOWN, VOCAB, target

from falcon_lab import testing
from falcon_lab.drafters.saved import WEIGHTS, load_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.export.strangers import import_strangers


def theirs(folder: Path, family: str = "llama", *, vocab: int = VOCAB) -> Path:
    """A small model that transformers has written."""
    made = testing.tiny_target(family, vocab=vocab, layers=1, seed=5)
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_small_model_is_a_draft_model(tmp_path: Path, family: str) -> None:
    """Of another family than the target's too, with tied tables (GPT-2's) or without."""
    import_strangers(theirs(tmp_path / "m", family), tmp_path / "out", target(), KNOWN, None)
    made = load_drafter(tmp_path / "out", target(), KNOWN)
    assert made.pretrained
    engine = testing.engine(target(), made, components=KNOWN)
    assert testing.lossless_rounds(engine, [[1, 2, 3]])
    stored = load_file(tmp_path / "m" / WEIGHTS)
    assert len(load_file(tmp_path / "out" / WEIGHTS)) == len(stored)


def test_a_tensor_that_the_model_does_not_read_is_refused(tmp_path: Path) -> None:
    weights = theirs(tmp_path / "m") / WEIGHTS
    save_file({**load_file(weights), "model.extra": torch.ones(2)}, weights, {"format": "pt"})
    with pytest.raises(FalconLabError, match=r"model\.extra"):
        import_strangers(tmp_path / "m", tmp_path / "out", target(), KNOWN, None)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match="vocabulary"):
        import_strangers(theirs(tmp_path / "m", vocab=14), tmp_path / "out", target(), KNOWN, None)
