"""Speculative sampling with a draft model. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import filled, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register

__all__ = ["HfLengthConfig", "SpsConfig", "register_components"]

LAYERS = 2
"""Layers of a fresh draft model."""


@dataclass
class SpsConfig(DraftVocabularyOption):
    """Configure the draft model: a pretrained one, or a fresh one of the target's kind."""

    model: str | None = filled(None, "name a model, or write null for a fresh one")
    """A hub id or a folder with the target's own vocabulary; null makes a fresh model, which must
    be distilled."""
    revision: str | None = filled(None, "name a commit, tag or branch, or write null")
    """Commit, tag or branch on the hub."""
    layers: int | None = ranged(None, least=1, most=1000)
    """Of a fresh model; null is 2."""
    hidden: int | None = ranged(None, least=1, most=2**16)
    """Its width; null is the target's."""
    heads: int | None = ranged(None, least=1, most=1024)
    """Its attention heads; null is as many as the target has."""
    intermediate: int | None = ranged(None, least=1, most=2**18)
    """Width of its feed-forward layers; null keeps the target's proportion."""

    def __post_init__(self) -> None:
        shape = ("layers", "hidden", "heads", "intermediate", "draft_vocabulary")
        given = [key for key in shape if getattr(self, key) is not None]
        if self.model is not None and given:
            raise ValueError(f"model {self.model!r} has a shape of its own; leave out {min(given)}")
        if self.model is None and self.revision is not None:
            raise ValueError("revision is that of a model; name the model")


@dataclass
class HfLengthConfig:
    """The heuristic of Hugging Face's assisted generation."""

    start: int = ranged(5, least=1, most=1000)
    """Draft tokens of a text's first round."""
    up: int = ranged(2, least=0, most=1000)
    """More of them after a round in which all were accepted."""
    down: int = ranged(1, least=0, most=1000)
    """Fewer after any other round; at least one is drafted."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter and the controller."""
    register.drafter(
        "sps",
        "falcon_lab_sps.drafter:SpsDrafter",
        config=SpsConfig,
        exports={
            "vllm": "falcon_lab_sps.exports:DraftModelVllm",
            "sglang": "falcon_lab_sps.exports:DraftModelSglang",
            "transformers": "falcon_lab_sps.exports:DraftModelFormat",
        },
        imports="falcon_lab_sps.imports:PlainModel",
    )
    register.controller("hf_length", "falcon_lab_sps.hf_length:HfLength", config=HfLengthConfig)
