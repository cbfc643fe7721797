"""Masked diffusion language models that draft (DiffuSpec, SpecDiff). Importing this imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import choice, filled, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register

__all__ = ["AdlConfig", "CpsConfig", "DiffusionConfig", "MdlmConfig", "register_components"]


@dataclass
class DiffusionConfig(DraftVocabularyOption):
    """Configure the masked language model: the target's first layers, or a pretrained one."""

    block: int = ranged(8, least=1, most=256)
    """Tokens that a pass drafts at the most, K."""
    steps: int = ranged(1, least=1, most=64)
    """Denoising steps of a draft, T; each is a pass of the model."""
    layers: int | None = ranged(None, least=1, most=1000)
    """The target's first layers, with which the model begins; null is a quarter of them."""
    attention: str | None = choice(None, ("block", "bidirectional"))
    """``block``: the text is read causally and cached, and masks see all of it and each other;
    ``bidirectional``: all tokens see all, and the whole text is read again in every pass. Null is
    block, and bidirectional for a pretrained model."""
    noise: str = choice("mdlm", ("mdlm", "none"))
    """In training: ``mdlm`` hides each token of a block with a chance t that is drawn for it, and
    weighs it by 1/t; ``none`` hides all, as the first pass of a draft does."""
    anchors: int = ranged(24, least=1, most=10_000)
    """Blocks of a packed sequence that are trained at a time (``block``)."""
    model: str | None = filled(None, "name a model, or write null for the target's own layers")
    """A hub id or folder of a masked diffusion model with the target's own vocabulary."""
    revision: str | None = filled(None, "name a commit, tag or branch, or write null")
    """Commit, tag or branch on the hub."""
    mask_token: str | None = filled(None, "name a token, or write null")
    """The mask of a pretrained model; null is its tokenizer's."""
    shift: bool = True
    """Whether the output at a token predicts the next one, as in models that began as causal ones
    (Dream, DiffuLLaMA), or what a mask stands for (LLaDA)."""

    def __post_init__(self) -> None:
        shape = ("layers", "draft_vocabulary")
        given = [key for key in shape if getattr(self, key) is not None]
        if self.model is not None and given:
            raise ValueError(f"model {self.model!r} has a shape of its own; leave out {min(given)}")
        if self.model is None:
            for key in ("revision", "mask_token"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is that of a model; name the model")
            if not self.shift:
                raise ValueError("shift is of a pretrained model; the target's layers look ahead")


@dataclass
class CpsConfig:
    """Configure causal-consistency path search (DiffuSpec) with the paper's defaults."""

    depth: int = ranged(30, least=0, most=256)
    """Longest path; the drafter's block and the controller limit it too."""
    beam: int = ranged(3, least=1, most=1000)
    """B: paths that are followed."""
    paths: int = ranged(1, least=1, most=1000)
    """Paths of the beam that are verified, joined to one tree."""
    mass: float = ranged(0.8, above=0.0, most=1.0)
    """tau: the candidates of a place are its most likely tokens up to this mass."""
    candidates: int = ranged(15, least=1, most=1000)
    """M_max: and no more of them."""
    weight: float = ranged(0.5, least=0.0, most=1.0)
    """lambda: of the drafter's log-probability; the rest is the n-gram model's."""
    ngrams: str | None = filled(None, "name an ARPA file, or write null")
    """An n-gram model of up to three tokens; null leaves paths to the drafter alone."""

    def __post_init__(self) -> None:
        if self.paths > self.beam:
            raise ValueError(f"paths is {self.paths}, and the beam has {self.beam}")


@dataclass
class AdlConfig:
    """Configure the adaptive draft length (DiffuSpec) with the paper's defaults."""

    least: int = ranged(20, least=1, most=256)
    """k_min."""
    most: int = ranged(30, least=1, most=256)
    """k_max, of the first round too."""
    step: int = ranged(10, least=0, most=256)
    """delta: added where as much is accepted as is generated."""
    decay: float = ranged(0.5, above=0.0, most=1.0)
    """rho: weight of the newest round in both moving averages."""

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, and most {self.most}")


@dataclass
class MdlmConfig:
    """Configure the bound of masked diffusion, and SpecDiff-2's streak beside it."""

    bound: float = ranged(1.0, least=0.0, most=1000.0)
    """Weight of the cross-entropy."""
    streak: float = ranged(0.0, least=0.0, most=1000.0)
    """Weight of the expected number of the target's tokens in a row."""
    label: str = choice("data", ("data", "target", "soft"))
    """The bound's label: the data's token, the target's most likely one, or its distribution."""

    def __post_init__(self) -> None:
        if not self.bound and not self.streak:
            raise ValueError("bound and streak are both 0; give one of them a weight")


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter, the tree builder, the controller and the objective."""
    package = "falcon_lab_diffusion"
    register.drafter("diffusion", f"{package}.drafter:DiffusionDrafter", config=DiffusionConfig)
    register.tree_builder("cps", f"{package}.path_search:PathSearch", config=CpsConfig)
    register.controller("adl", f"{package}.adaptive_length:AdaptiveLength", config=AdlConfig)
    register.objective("mdlm", f"{package}.objective:MdlmObjective", config=MdlmConfig)
