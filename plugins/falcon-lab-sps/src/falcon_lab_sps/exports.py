"""A draft model as a plain Hugging Face folder, which engines take beside a target."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.export.mapping import dtype_of, sglang_command, vllm_command
from falcon_lab.interfaces import Exported, ExportFormat, TrainedDrafter
from falcon_lab.model.families import decoder_of

BASE = "model.backbone.base."
HEAD = "model.head."


class DraftModelFormat(ExportFormat):
    """A causal language model with its tokenizer, as ``save_pretrained`` writes them."""

    engines = "transformers (5.23)"
    tags = ("assistant-model",)

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map names to those of the family's own class.

        Raises:
            FalconLabError: it drafts over some tokens alone.
        """
        if drafter.config.draft_vocabulary is not None:
            raise FalconLabError(
                "engines want a draft model with the target's own vocabulary; train one with "
                "drafter.draft_vocabulary=null"
            )
        made, prefixes = skeleton(drafter.drafter)
        tensors = {}
        for name, tensor in drafter.tensors.items():
            ours = next(each for each in prefixes if name.startswith(each))
            tensors[prefixes[ours] + name.removeprefix(ours)] = tensor
        config = {
            **json.loads(made.config.to_json_string()),
            "architectures": [type(made).__name__],
            "dtype": dtype_of(tensors),
            "tie_word_embeddings": not any(name.startswith(HEAD) for name in drafter.tensors),
        }
        return Exported(config, tensors, tokenizer_files(drafter.host.tokenizer))

    def read(self, exported: Exported, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map the names back."""
        _, prefixes = skeleton(drafter.drafter)
        order = sorted(prefixes.items(), key=lambda pair: -len(pair[1]))
        ours = {}
        for name, tensor in exported.tensors.items():
            mine, theirs = next(pair for pair in order if name.startswith(pair[1]))
            ours[mine + name.removeprefix(theirs)] = tensor
        return ours

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return a few lines of Python."""
        return (
            "```python\nfrom transformers import AutoModelForCausalLM\n\n"
            f'target = AutoModelForCausalLM.from_pretrained("{drafter.place}")\n'
            f'draft = AutoModelForCausalLM.from_pretrained("{folder}")\n'
            "target.generate(**inputs, assistant_model=draft, do_sample=False)\n```"
        )


def skeleton(drafter: Any) -> tuple[Any, dict[str, str]]:
    """Return a model of the family's class without weights, and our prefixes of names -> its."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(drafter.model.config)
    decoder, head = decoder_of(made), made.get_output_embeddings()
    names = {id(module): name for name, module in made.named_modules()}
    return made, {BASE: f"{names[id(decoder)]}.", HEAD: f"{names[id(head)]}."}


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer."""
    with TemporaryDirectory(prefix="falcon-lab-") as folder:
        tokenizer.save_pretrained(folder)
        return {each.name: each.read_bytes() for each in sorted(Path(folder).iterdir())}


class DraftModelVllm(DraftModelFormat):
    """A draft model for vLLM's ``draft_model``."""

    engines = "vLLM (0.32 and 0.33)"
    tags = ("vllm",)

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line."""
        return vllm_command(folder, drafter.place, "draft_model", drafter.draft_tokens)


class DraftModelSglang(DraftModelFormat):
    """A draft model for SGLang's ``STANDALONE``."""

    engines = "SGLang (0.5.23)"
    tags = ("sglang",)

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line; SGLang counts the root among the draft tokens."""
        return sglang_command(folder, drafter.place, "STANDALONE", drafter.draft_tokens)
