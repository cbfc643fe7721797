"""Medusa's heads as vLLM reads them (up to 0.32; later versions have no Medusa)."""

from __future__ import annotations

import re

from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.export.mapping import IDS, dtype_of, plain_tables, vllm_command, without
from falcon_lab.interfaces import Exported, ExportFormat, TrainedDrafter

TRUNK = re.compile(r"trunks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
SHARED = "lm_heads.0.weight"
"""The only LM head, where the target's is used."""


class MedusaVllm(ExportFormat):
    """Medusa for vLLM's ``MedusaModel``."""

    engines = "vLLM (up to 0.32)"
    tags = ("medusa", "vllm")

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map names and configuration; without output layers of its own the target's come along."""
        ours, host = drafter.tensors, drafter.host
        if IDS in ours:
            raise FalconLabError(
                "it has a draft vocabulary, with which vLLM's Medusa does not load (0.32 takes "
                "its own token_map for a weight that is missing); train one with "
                "drafter.draft_vocabulary=null"
            )
        tensors = {_block(name): ours[name] for name in ours if TRUNK.fullmatch(name)}
        heads = {name: ours[name] for name in ours if name.startswith("heads.")}
        if any(name.endswith("bias") for name in heads):
            raise FalconLabError("its output layers have a bias, and vLLM's have none")
        tensors |= {_head(name): head for name, head in heads.items()}
        if not heads:
            tensors[SHARED] = plain_tables(host).head
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": host.hidden_size,
            "vocab_size": host.vocab_size,
            "truncated_vocab_size": host.vocab_size,
            "num_heads": drafter.config.block,
            "num_hidden_layers": drafter.config.layers,
            "medusa_fc_bias": True,
            "original_lm_head": not heads,
            "dtype": dtype_of(tensors),
            "torch_dtype": dtype_of(tensors),
        }
        return Exported(config, tensors)

    def read(self, exported: Exported, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map the names back."""
        tensors, ours = dict(exported.tensors), {}
        if drafter.config.head != "own":
            tensors = without(tensors, SHARED)
        for name, tensor in tensors.items():
            if found := BLOCK.fullmatch(name):
                ours["trunks.{}.{}.linear.{}".format(*found.groups())] = tensor
            else:
                ours[f"heads.{name.split('.')[1]}.linear.weight"] = tensor
        return ours

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line; every head drafts one token."""
        return vllm_command(folder, drafter.place, "medusa", drafter.config.block)


def _block(name: str) -> str:
    found = TRUNK.fullmatch(name)
    assert found is not None
    return "blocks.{}.layers.{}.{}".format(*found.groups())


def _head(name: str) -> str:
    return f"lm_heads.{name.split('.')[1]}.weight"
