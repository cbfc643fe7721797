"""A small language model that somebody else has trained, as a draft model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import ImportFormat, StrangersFolder, TrainedDrafter
from falcon_lab_sps.exports import HEAD, skeleton

KINDS = ("ForCausalLM", "LMHeadModel")
"""End the names of classes of causal language models."""


class PlainModel(ImportFormat):
    """A causal language model as ``save_pretrained`` writes it.

    The saved drafter has its weights, and finds its configuration and tokenizer where they are.
    """

    programs = "transformers"

    def recognises(self, folder: StrangersFolder) -> bool:
        """Return whether it is a causal language model, and nothing is fused."""
        named = folder.config.get("architectures")
        known = isinstance(named, list) and any(str(each).endswith(KINDS) for each in named)
        return known and not any(name.startswith(("fc.", "midlayer.")) for name in folder.tensors)

    def options(self, folder: StrangersFolder, host: Any) -> dict[str, Any]:
        """Return its place; whether its vocabulary is the target's is seen as it is loaded."""
        return {"model": str(folder.path.resolve())}

    def read(self, folder: StrangersFolder, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Return what was loaded, and see that it is every tensor of the folder."""
        ours = {name: each.detach().cpu() for name, each in drafter.drafter.state_dict().items()}
        _, prefixes = skeleton(drafter.drafter)
        for mine, theirs in prefixes.items():
            for name in [each for each in ours if each.startswith(mine)]:
                stored = folder.tensors.pop(theirs + name.removeprefix(mine), None)
                if stored is not None:
                    ours[name] = stored
        tied = prefixes[HEAD] + "weight"
        table = drafter.drafter.model.backbone.base.get_input_embeddings().weight
        if tied in folder.tensors and torch.equal(folder.tensors[tied].float(), table.float()):
            folder.tensors.pop(tied)  # written twice
        return ours
