from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dflash_cases import KNOWN, target

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.export.folder import Export, read_exported

NODES: dict[str, dict[str, Any]] = {
    "plain": {"name": "dflash", "block": 3, "layers": 2, "taps": [1, 2]},
    "draft vocabulary": {"name": "dflash", "block": 2, "layers": 1, "draft_vocabulary": 9},
}


@pytest.mark.parametrize(
    ("name", "node"), [("vllm", "plain"), ("vllm", "draft vocabulary"), ("sglang", "plain")]
)
def test_nothing_is_lost_on_the_way_there_and_back(tmp_path: Path, name: str, node: str) -> None:
    testing.check_export(tmp_path, target(), NODES[node], name, KNOWN)


def test_a_block_has_its_root_and_layers_are_numbered_from_zero(tmp_path: Path) -> None:
    testing.check_export(tmp_path, target(), NODES["plain"], "vllm", KNOWN)
    found = read_exported(tmp_path / "out")
    assert found.config["block_size"] == 4
    assert found.config["dflash_config"]["target_layer_ids"] == [0, 1]
    assert set(found.others) == {"mask_embedding.pt"}
    names = {re.sub(r"layers\.\d+", "layers.N", name) for name in found.tensors}
    assert {"fc.weight", "hidden_norm.weight", "layers.N.self_attn.q_norm.weight"} <= names


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("vllm", {"taps": [0, 1]}, "embeddings"),
        ("vllm", {"causal": True}, "causal=true"),
        ("sglang", {"draft_vocabulary": 9}, "draft_vocabulary=null"),
    ],
)
def test_what_the_format_cannot_say_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    node = {"name": "dflash", "block": 2, "layers": 1, **options}
    testing.save_for_export(tmp_path / "drafter", target(), node, KNOWN)
    export = Export.of(tmp_path / "drafter", name, target(), "org/target", KNOWN, 4)
    with pytest.raises(FalconLabError, match=said):
        export.write(tmp_path / "out")
