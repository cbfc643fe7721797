"""The built-in components with their options, on one page.

They come in through the same hook as any plug-in. Nothing here imports torch: builders are named
by strings and imported when a component is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from falcon_lab.fields import choice, each_once, filled, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register, hookimpl

PROPOSALS = ("deterministic", "sampled")

LARGEST_BLOCK = 256
"""Most tokens of a drafter pass."""

MOST_LAYERS = 100
"""Most layers of a drafter."""

LONGEST_PATH = 1000
"""Most levels of a tree, and passes of a round."""

MOST_NODES = 2048
"""Most draft tokens of a round; attention masks grow with their square."""


@dataclass
class FalconConfig(DraftVocabularyOption):
    """Falcon's semi-autoregressive head (arXiv 2412.12639, §3.2). ``block: 1, fuse: linear`` is
    EAGLE-1."""

    block: int = ranged(2, least=1, most=LARGEST_BLOCK)
    """k: tokens per drafter pass."""
    layers: int = ranged(1, least=1, most=MOST_LAYERS)
    """Decoder blocks of the target's own kind (the paper's text has one or two; Figure 2 two)."""
    fuse: str = choice("lstm", ("lstm", "lstm_positionwise", "linear"))
    """``lstm`` (recurs over time), ``lstm_positionwise`` (what the official code computes) or
    ``linear`` (EAGLE)."""
    lstm_layers: int = ranged(2, least=1, most=MOST_LAYERS)
    dropout: float = ranged(0.1, least=0, below=1)
    """Between the LSTM layers."""
    query: str = choice("block", ("block", "newest", "mapped"))
    """``block``: the last k rows predict (paper); ``newest``: all k are queries of the newest;
    ``mapped``: each of them through a linear map of its own."""
    phase: str = choice("aligned", ("aligned", "absolute"))
    """``aligned``: the last k rows are one block, and training covers every phase; ``absolute``:
    blocks sit at multiples of k (the official code)."""
    taps: list[int] = each_once(ranged([], least=0, most=2**16))
    """Layers of the target, counted from 1, whose hidden states are mixed with its features (not
    in the paper); with ``glancing.name: none``."""


@dataclass
class CsgdConfig:
    """Coupled Sequential Glancing Distillation (arXiv 2412.12639, §3.2).

    The ratio falls linearly from ``start`` to ``end``: 0.4 to 0 in the paper, 0.45 to 0.1 in the
    official code.
    """

    start: float = ranged(0.4, least=0, most=1)
    end: float = ranged(0.0, least=0, most=1)
    tokens: str = choice("target", ("target", "data"))
    """Revealed tokens: ``target`` (its argmax, the paper) or ``data`` (the official code)."""
    revealed_in_loss: bool = True
    """Whether revealed positions count in the loss (official code) or not (GLAT)."""


@dataclass
class RandomConfig(CsgdConfig):
    """Glancing at random positions (GLAT, arXiv 2008.07905, §3.2), with GLAT's own ratios. GLAT
    leaves revealed positions out of the loss."""

    start: float = ranged(0.5, least=0, most=1)
    end: float = ranged(0.3, least=0, most=1)
    revealed_in_loss: bool = False


@dataclass
class ValidPrefixConfig:
    """SpecBlock's mask: a row counts in the loss while all before it in its block are right."""

    schedule: dict[str, Any] = field(
        default_factory=lambda: {"name": "none"}, metadata={"component": "schedule"}
    )
    """What is shown to the drafter: another schedule's node."""


@dataclass
class FalconObjectiveConfig:
    """L = feature·SmoothL1 + soft·KL + hard·CE; the paper's weights are 1, 0.09 and 0.01."""

    feature: float = ranged(1.0, least=0, most=1e6)
    feature_form: str = choice("smooth_l1", ("smooth_l1", "mse"))
    """What the feature term is, a mean over the channels: ``smooth_l1``, or ``mse`` (Chimera's)."""
    soft: float = ranged(0.09, least=0, most=1e6)
    hard: float = ranged(0.01, least=0, most=1e6)
    hard_label: str = choice("argmax", ("argmax", "data", "sampled"))
    """``argmax`` of the target, the ``data``'s token, or ``sampled`` from the target (official
    code)."""
    soft_form: str = choice("kl", ("kl", "tempered", "l1"))
    """``kl``, ``tempered`` (the official code's temperature mixture), or ``l1``: Σ|p - q|, twice
    the chance that sampling rejects a token (DSpark's)."""
    temperature: float = ranged(0.95, least=1e-3, most=1000)
    """Of the tempered form."""
    slot_decay: float = ranged(1.0, least=1e-3, most=1)
    """A row counts slot_decay to the power of its place in the block, 0..k-1: later rows are of use
    where the earlier ones are right (not in the paper; DFlash has exp(-1/4) for a block of 8)."""

    def __post_init__(self) -> None:
        if not self.feature + self.soft + self.hard:
            raise ValueError("feature, soft and hard are all 0; give one of them a weight")


@dataclass
class ChainConfig:
    """A single path of draft tokens."""

    depth: int = ranged(4, least=0, most=LONGEST_PATH)
    proposal: str = choice("sampled", PROPOSALS)
    """At T > 0: a token that is drawn from the drafter's distribution, or the most likely one
    (``deterministic``), which is accepted less often and has a seed write plain decoding's text."""


@dataclass
class StaticConfig:
    """A tree drawn by hand."""

    template: Any = "auto"
    """The name of a template, shipped (``auto`` picks one by k) or a plug-in's; a mapping from node
    to child count (a node is its rank digits, "" the root); or a list of rank paths."""
    proposal: str = choice("sampled", PROPOSALS)
    """At T > 0: candidates that are drawn without replacement, or the top ones
    (``deterministic``)."""
    max_depth: int | None = ranged(None, least=0, most=LONGEST_PATH)
    """Cut the template at this depth."""


@dataclass
class DynamicTreeConfig:
    """A tree that goes where the drafter is sure (EAGLE-2, arXiv 2406.16858, §4). EAGLE-2's own
    numbers are ``nodes: 60, beam: 10, width: 10, depth: 7``."""

    nodes: int = ranged(16, least=0, most=MOST_NODES)
    """Draft tokens that are kept of all candidates."""
    beam: int = ranged(4, least=1, most=1000)
    """Most blocks that a pass expands."""
    width: int = ranged(4, least=1, most=1000)
    """Candidates of every position."""
    depth: int | None = ranged(None, least=0, most=LONGEST_PATH)
    """Longest path; null goes by k: 4 for k = 1, 6 for k = 2, 2k above."""


@dataclass
class PathsTreeConfig:
    """The paths that a drafter has found (n-grams of Lookahead, or copies of the text), as one
    tree."""

    nodes: int = ranged(32, least=0, most=MOST_NODES)
    """Most draft tokens; what does not fit is left out, the last paths first."""
    depth: int = ranged(10, least=0, most=LONGEST_PATH)
    """Longest path."""


@dataclass
class OptimalTreeConfig:
    """The likeliest tree of its size, by the drafter's own probabilities."""

    nodes: int = ranged(16, least=0, most=MOST_NODES)
    """Draft tokens in the tree."""
    passes: int | None = ranged(None, least=0, most=LONGEST_PATH)
    """Drafter passes, each of k levels; null goes by k: 4 for k = 1, 3 for k = 2, 2 above."""


@dataclass
class UnionConfig:
    """Several drafters whose candidates share one tree: ``tree: {name: union}``, which has a tree
    for each of them."""

    parts: list[dict[str, Any]] = field(default_factory=list, metadata={"component": "drafter"})
    """Their nodes, two at the least; a trained one is ``{name: saved}``."""


@dataclass
class UnionTreeConfig:
    """The trees of a union's drafters, joined where they begin alike."""

    parts: list[dict[str, Any]] = field(
        default_factory=list, metadata={"component": "tree_builder"}
    )
    """A node for each of the drafters, in their order."""
    nodes: int = ranged(32, least=0, most=MOST_NODES)
    """Draft tokens that are kept of all trees: those likeliest to be accepted, by what was accepted
    of each part in this text."""


@dataclass
class SavedConfig:
    """A drafter that was trained and saved, as a part of another component."""

    path: str | None = filled(None, "name a folder, or write null")
    """Its folder or name; null: the run's own."""


@dataclass
class FixedConfig:
    """The same budget every round; null leaves it to the tree."""

    depth: int | None = ranged(None, least=0, most=LONGEST_PATH)
    nodes: int | None = ranged(None, least=0, most=MOST_NODES)
    passes: int | None = ranged(None, least=0, most=LONGEST_PATH)


@dataclass
class ConfidenceConfig(FixedConfig):
    """Draft on while the likeliest path is likely to be accepted, within the same budget."""

    threshold: float = ranged(0.3, above=0, most=1)
    """Stop when the drafter's own probability of its likeliest path falls below this."""


@hookimpl
def register_components(register: Register) -> None:
    """Register everything that ships with falcon-lab."""
    register.target("tiny-code", "falcon_lab.pretraining.target:tiny_code")
    register.drafter("falcon", "falcon_lab.drafters.falcon:FalconDrafter", config=FalconConfig)
    register.drafter("saved", "falcon_lab.drafters.saved:saved_drafter", config=SavedConfig)
    register.drafter("union", "falcon_lab.drafters.union:Union", config=UnionConfig)
    register.schedule("csgd", "falcon_lab.glancing:Csgd", config=CsgdConfig)
    register.schedule("random", "falcon_lab.glancing:RandomGlancing", config=RandomConfig)
    register.schedule("valid_prefix", "falcon_lab.glancing:ValidPrefix", config=ValidPrefixConfig)
    register.schedule("none", "falcon_lab.glancing:NoGlancing")
    register.objective(
        "falcon", "falcon_lab.objectives:FalconObjective", config=FalconObjectiveConfig
    )
    register.tree_builder("chain", "falcon_lab.trees.template_tree:Chain", config=ChainConfig)
    register.tree_builder(
        "static", "falcon_lab.trees.template_tree:StaticTree", config=StaticConfig
    )
    register.tree_builder(
        "dynamic", "falcon_lab.trees.best_first:DynamicTree", config=DynamicTreeConfig
    )
    register.tree_builder("paths", "falcon_lab.trees.paths:PathsTree", config=PathsTreeConfig)
    register.tree_builder(
        "optimal", "falcon_lab.trees.best_first:OptimalTree", config=OptimalTreeConfig
    )
    register.tree_builder("union", "falcon_lab.trees.union:UnionTree", config=UnionTreeConfig)
    register.template("vicuna", "falcon_lab.trees.templates:vicuna")
    register.template("llama", "falcon_lab.trees.templates:llama")
    register.acceptance_rule("auto", "falcon_lab.acceptance:Auto")
    register.acceptance_rule("greedy", "falcon_lab.acceptance:Greedy")
    register.acceptance_rule("sampling", "falcon_lab.acceptance:SamplingRule")
    register.controller("confidence", "falcon_lab.controllers:Confidence", config=ConfidenceConfig)
    register.controller("fixed", "falcon_lab.controllers:Fixed", config=FixedConfig)
