"""EAGLE's drafters for falcon-lab. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import choice, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, LayerOptions, Register

__all__ = ["Eagle3Config", "EagleConfig", "FspadConfig", "register_components"]


@dataclass
class LayersOption(DraftVocabularyOption):
    """What EAGLE-1 and heads on its model have in common."""

    layers: int = ranged(1, least=1, most=100)
    """Decoder blocks of the target's own kind."""


@dataclass
class EagleConfig(LayersOption):
    """Configure EAGLE (arXiv 2401.15077, §4.1); with tree ``dynamic`` EAGLE-2 (2406.16858)."""

    form: str = choice("full", ("full", "published"))
    """``full``: blocks as the target has them; ``published``: as the published heads and engines
    have them, without the first block's input norm, a final norm and a bias where inputs are
    fused."""
    bias: bool | None = None
    """Of the map that fuses inputs; null is as the form has it. Some published heads have one."""


@dataclass
class Eagle3Config(LayerOptions, DraftVocabularyOption):
    """Configure EAGLE-3 (arXiv 2503.01840, §3)."""

    taps: list[int] | None = ranged(None, least=0, most=1000)
    """Layers of the target that are read (0: its embeddings, i: what layer i puts out); null is a
    low, a middle and a high one: 2, L // 2 and L - 3 of L layers."""
    head: str = choice("target", ("target", "own"))
    """``target``: its frozen LM head; ``own``: one that is trained, as in the official code."""
    norm_before_residual: bool = False
    """Around the attention goes the hidden state behind its norm, as speculators has it."""
    eps: float = ranged(1e-6, above=0, most=1)
    """Of the norms."""

    def __post_init__(self) -> None:
        if self.taps is not None and not self.taps:
            raise ValueError("taps must name at least one layer, or be null")


@dataclass
class FspadConfig(LayersOption):
    """Configure FSPAD (arXiv 2408.15562); without both of its changes it is EAGLE-1."""

    sampling: bool = True
    """Feature sampling: the token's embedding gates what of the fused input goes on."""
    alignment: bool = True
    """Partial alignment: what the LM head reads, and what is trained to be the target's feature
    and read by the next pass, are two outputs."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafters, and the tree that EAGLE was published with."""
    register.drafter(
        "eagle",
        "falcon_lab_eagle.eagle:EagleDrafter",
        config=EagleConfig,
        exports={
            "vllm": "falcon_lab_eagle.exports:EagleVllm",
            "sglang": "falcon_lab_eagle.exports:EagleSglang",
        },
        imports="falcon_lab_eagle.imports:EagleFolder",
    )
    register.drafter(
        "eagle3",
        "falcon_lab_eagle.eagle3:Eagle3Drafter",
        config=Eagle3Config,
        exports={
            "vllm": "falcon_lab_eagle.exports:Eagle3Vllm",
            "speculators": "falcon_lab_eagle.exports:Eagle3Speculators",
            "sglang": "falcon_lab_eagle.exports:Eagle3Sglang",
            "openvino": "falcon_lab_eagle.exports:Eagle3Openvino",
        },
        imports="falcon_lab_eagle.imports:Eagle3Folder",
    )
    register.drafter("fspad", "falcon_lab_eagle.fspad:FspadDrafter", config=FspadConfig)
    register.template("eagle1", "falcon_lab_eagle.tree:published_tree")
