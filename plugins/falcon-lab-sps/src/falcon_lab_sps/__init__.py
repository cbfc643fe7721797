"""Speculative sampling with a small language model. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.plugins.hooks import Register

__all__ = ["HfLengthConfig", "SpsConfig", "register_components"]

LAYERS = 2
"""Of a fresh draft model."""


@dataclass
class SpsConfig:
    """Which small language model drafts: one that is there, or a fresh one of the target's kind."""

    model: str | None = None
    """A hub id or a folder with the target's own vocabulary; null makes a fresh model, which must
    be distilled."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    layers: int | None = None
    """Of a fresh model; null is 2."""
    hidden: int | None = None
    """Its width; null is the target's."""
    heads: int | None = None
    """Its attention heads; null is as many as the target has."""
    intermediate: int | None = None
    """Width of its feed-forward layers; null keeps the target's proportion."""

    def __post_init__(self) -> None:
        shape = {key: getattr(self, key) for key in ("layers", "hidden", "heads", "intermediate")}
        given = {key: value for key, value in shape.items() if value is not None}
        if self.model is not None and given:
            raise ValueError(f"model {self.model!r} has a shape of its own; leave out {min(given)}")
        if self.model is None and self.revision is not None:
            raise ValueError("revision is that of a model; name the model")
        for key, value in given.items():
            if value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")


@dataclass
class HfLengthConfig:
    """The heuristic of Hugging Face's assisted generation."""

    start: int = 5
    """Draft tokens of a text's first round."""
    up: int = 2
    """More of them after a round in which all were accepted."""
    down: int = 1
    """Fewer after any other round; at least one is drafted."""

    def __post_init__(self) -> None:
        for key, least in (("start", 1), ("up", 0), ("down", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, got {getattr(self, key)}")


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter and the controller."""
    register.drafter("sps", "falcon_lab_sps.drafter:SpsDrafter", config=SpsConfig)
    register.controller("hf_length", "falcon_lab_sps.hf_length:HfLength", config=HfLengthConfig)
