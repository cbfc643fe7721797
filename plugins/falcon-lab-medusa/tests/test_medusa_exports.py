from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_cases import KNOWN, target
from torch import Tensor
from torch.nn import functional

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.export.folder import Export, read_exported
from falcon_lab.interfaces import Exported, Frontier, Observation

NODES: dict[str, dict[str, Any]] = {
    "own heads": {"name": "medusa", "block": 2, "layers": 2},
    "target's head": {"name": "medusa", "block": 3, "head": "shared"},
}


def drafted_by_an_engine(found: Exported, feature: Tensor) -> Tensor:
    """Logits of every head over the target's tokens, by the folder alone."""
    config, weights, rows = found.config, found.tensors, []
    for head in range(config["num_heads"]):
        hidden = feature
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            inner = functional.linear(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"])
            hidden = hidden + functional.silu(inner)
        number = 0 if config["original_lm_head"] else head
        logits = weights[f"lm_heads.{number}.weight"] @ hidden
        rows.append(logits)
    return torch.stack(rows)


@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
@torch.no_grad()
def test_nothing_is_lost_and_a_reader_of_the_folder_alone_drafts_the_same(
    tmp_path: Path, node: dict[str, Any]
) -> None:
    made = testing.check_export(tmp_path, target(), node, "vllm", KNOWN).trained.drafter
    feature = torch.linspace(-1, 1, target().hidden_size)
    made.reset(torch.tensor(1))
    made.observe(Observation(torch.tensor([2]), feature[None]))
    logits = made.draft(Frontier.root(torch.device("cpu"))).logits[0]
    found = drafted_by_an_engine(read_exported(tmp_path / "out"), feature)
    torch.testing.assert_close(found, logits)


def test_a_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    """vLLM makes a weight of ``token_map``, and ends as that was not loaded."""
    node = {"name": "medusa", "block": 2, "draft_vocabulary": 9}
    testing.save_for_export(tmp_path / "drafter", target(), node, KNOWN)
    export = Export.of(tmp_path / "drafter", "vllm", target(), "org/target", KNOWN, 4)
    with pytest.raises(FalconLabError, match="draft_vocabulary=null"):
        export.write(tmp_path / "out")
