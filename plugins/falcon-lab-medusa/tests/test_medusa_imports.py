"""Heads of other programs: folders by their names and keys, without a word of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_cases import KNOWN, target
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from falcon_lab import testing
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.export.strangers import import_strangers
from falcon_lab.interfaces import Frontier, Observation

HEADS, VOCAB = 2, 12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def published() -> dict[str, Tensor]:
    """As its authors name them: a residual layer and an output layer a head."""
    width, tensors = target().hidden_size, {}
    for head in range(HEADS):
        tensors[f"{head}.0.linear.weight"] = drawn(width, width, seed=head)
        tensors[f"{head}.0.linear.bias"] = drawn(width, seed=head + 5)
        tensors[f"{head}.1.weight"] = drawn(VOCAB, width, seed=head + 9)
    return tensors


def of_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same as vLLM names them."""
    parts = {"0.linear": "blocks.{}.layers.0", "1": "lm_heads.{}"}
    return {
        f"{parts[name[2:].rsplit('.', 1)[0]].format(name[0])}.{name.rsplit('.', 1)[1]}": each
        for name, each in tensors.items()
    }


def imported(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Any:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(tensors, path / file)
    else:
        save_file(tensors, path / file)
    import_strangers(path, path.with_name("out"), target(), KNOWN, None)
    return load_drafter(path.with_name("out"), target(), KNOWN)


AUTHORS = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"}


def drafted(made: Any, feature: Tensor) -> Tensor:
    made.reset(torch.tensor(1))
    made.observe(Observation(torch.tensor([2]), feature[None]))
    found = made.draft(Frontier.root(torch.device("cpu")))
    logits: Tensor = found.logits[0]
    return logits if found.vocabulary is None else found.vocabulary.spread(logits, -torch.inf)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors", "tokens"])
@torch.no_grad()
def test_heads_of_others_draft_what_their_folder_says(tmp_path: Path, file: str) -> None:
    tensors, config, order = published(), dict(AUTHORS), torch.arange(VOCAB)
    weights = dict(tensors)
    if file != "medusa_lm_head.pt":
        weights = of_vllm(weights)
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": HEADS}
    if file == "tokens":  # some alone, the most frequent first, for which rows are chosen
        order = torch.tensor([3, 1, 8, 2, 11])
        weights["token_map"], file = order, "model.safetensors"
    made = imported(tmp_path / "theirs", config, weights, file)
    feature = drawn(target().hidden_size, seed=30)
    found = drafted(made, feature)
    for head in range(HEADS):
        layer = f"{head}.0.linear"
        inner = functional.linear(feature, tensors[f"{layer}.weight"], tensors[f"{layer}.bias"])
        logits = tensors[f"{head}.1.weight"] @ (feature + functional.silu(inner))
        expected = torch.full_like(logits, -torch.inf)
        expected[order] = logits[order]
        torch.testing.assert_close(found[head], expected)


def test_layers_without_a_bias_have_one_of_zeros(tmp_path: Path) -> None:
    weights = {name: each for name, each in published().items() if not name.endswith("bias")}
    made = imported(tmp_path / "theirs", AUTHORS, weights, "medusa_lm_head.safetensors")
    assert not made.trunks[0][0].linear.bias.any()


@pytest.mark.parametrize("node", [{"head": "own"}, {"head": "shared", "layers": 2}])
def test_an_export_that_nobody_knows_for_ours_is_the_same_drafter(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    testing.check_import(tmp_path, target(), {"name": "medusa", **node}, "vllm", KNOWN)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"0.0.norm.weight": torch.ones(2)}, "holds 0.0.norm.weight"),
        ({"1.1.weight": torch.ones(5, 32)}, r"heads.1.linear.weight is \[5, 32\]"),
        ({"lm_head.weight": torch.ones(12, 32)}, "not the target's LM head"),
        ({"token_map": torch.tensor([1, 1])}, "each once"),
    ],
)
def test_what_medusa_of_ours_does_not_compute_is_refused(
    tmp_path: Path, changed: dict[str, Tensor], said: str
) -> None:
    with pytest.raises(FalconLabError, match=said):
        imported(tmp_path / "theirs", AUTHORS, {**published(), **changed}, "model.safetensors")
