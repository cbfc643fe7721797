"""What a round of decoding is made of: budget, frontier, tree builder, acceptance, controller.

Shapes: N tree nodes, F frontier blocks, k block, V vocabulary, H hidden, A accepted draft tokens, P
nodes of a padded path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces.vocabulary import DraftVocabulary
from falcon_lab.sampling import Sampling
from falcon_lab.tree import Proposal, TokenTree


@dataclass(frozen=True, slots=True)
class Budget:
    """What one round may spend. ``None`` leaves the choice to the tree builder.

    Attributes:
        depth: longest path of draft tokens (0 makes the round a plain decoding step).
        nodes: draft tokens in the tree, the root not counted.
        passes: drafter passes.
    """

    depth: int | None = None
    nodes: int | None = None
    passes: int | None = None

    def limit(self, *, depth: int, nodes: int, block: int) -> tuple[int, int]:
        """Return a tree's own depth and nodes, cut to what may be spent.

        Args:
            depth: its longest path.
            nodes: its draft tokens.
            block: k, the depth of a pass.
        """
        depths = [depth]
        if self.depth is not None:
            depths.append(self.depth)
        if self.passes is not None:
            depths.append(self.passes * block)
        return min(depths), nodes if self.nodes is None else min(nodes, self.nodes)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The F blocks that the drafter expands in one pass.

    The first pass of a round has one block, the root: ``tokens`` is ``[1, 0]`` and ``parents`` is
    ``[-1]``. In a later pass each block stands at a tree node; ``tokens`` are the k draft tokens
    on the way to it from the block it grew out of, and ``parents`` is that block's index in the
    pass before.

    Attributes:
        tokens: ``[F, k]`` long (``[1, 0]`` in the first pass).
        parents: ``[F]`` long, block index in the previous pass.
        parts: where the drafter is made of others, what each of them expands, None for one that
            drafts no further this round; tokens and parents are those of the first that does.
    """

    tokens: Tensor
    parents: Tensor
    parts: tuple[Frontier | None, ...] = ()

    @classmethod
    def root(cls, device: torch.device) -> Frontier:
        """Return the frontier of a round's first pass."""
        return cls(
            torch.empty(1, 0, dtype=torch.long, device=device),
            torch.full((1,), -1, dtype=torch.long, device=device),
        )


@dataclass(frozen=True)
class DraftOutput:
    """What one drafter pass predicts below every frontier block.

    Attributes:
        logits: ``[F, n, V]`` with ``n <= k``. Entry j is the distribution of the token j + 1 steps
            below the block's node. ``-inf`` marks a token that is not proposed at all; n = 0 means
            that nothing is. With a ``vocabulary`` they are as wide as that.
        features: ``[F, n, H]`` predicted features, if there are any.
        all_proposed: no token is marked so, which saves a wait for the device.
        paths: whole paths of tokens below the root, best first, of a drafter that has such (one
            that looks them up); the tree builder ``paths`` uses them. None: it never has any.
        vocabulary: the tokens that the columns of ``logits`` are about; None: column c is the
            target's token c.
        parts: where the drafter is made of others, the output of each of them that was asked for
            one; what is beside it here is the first of these.
    """

    logits: Tensor
    features: Tensor | None = None
    all_proposed: bool = False
    paths: Sequence[Sequence[int]] | None = None
    vocabulary: DraftVocabulary | None = None
    parts: tuple[DraftOutput | None, ...] = ()

    @classmethod
    def nothing(
        cls, frontier: Frontier, vocab_size: int, vocabulary: DraftVocabulary | None = None
    ) -> DraftOutput:
        """Return that nothing is proposed below any block of a frontier.

        Args:
            frontier: the blocks.
            vocab_size: of the target.
            vocabulary: of the drafter, if it has one of its own.
        """
        size = vocab_size if vocabulary is None else vocabulary.vocab_size
        shape = (frontier.tokens.shape[0], 0, size)
        return cls(torch.empty(shape, device=frontier.tokens.device), vocabulary=vocabulary)

    @cached_property
    def log_probabilities(self) -> Tensor:
        """As ``logits``, float, computed once; NaN throughout where nothing is proposed."""
        return self.logits.float().log_softmax(-1)

    def target_tokens(self, columns: Tensor) -> Tensor:
        """Return the target's tokens of columns of ``logits``, ``[...]`` long."""
        return columns if self.vocabulary is None else self.vocabulary.tokens(columns)

    def over_target(self, values: Tensor, outside: float = 0.0) -> Tensor:
        """Return ``[..., V]``: values of the columns of ``logits`` at the target's tokens.

        Args:
            values: as wide as ``logits``.
            outside: that of tokens which have no column.
        """
        return values if self.vocabulary is None else self.vocabulary.spread(values, outside)

    @property
    def target_logits(self) -> Tensor:
        """``[F, n, V]``, whatever the vocabulary; ``-inf`` for tokens that are not in it."""
        return self.over_target(self.logits, -torch.inf)


def unknown_text(count: int) -> list[int]:
    """Return no tokens: nobody says which text it is."""
    del count
    return []


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a tree builder is given when a round starts, and a drafter that asks for it.

    Attributes:
        root: 0-d long, the newest token, not yet read by the target.
        budget: what the round may spend.
        sampling: how tokens are drawn from the target (greedy or T > 0).
        generator: source of randomness for sampled proposals.
        text: returns the newest n committed tokens, the root last; fewer where there are no more.
    """

    root: Tensor
    budget: Budget
    sampling: Sampling
    generator: torch.Generator
    text: Callable[[int], list[int]] = unknown_text


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a controller and a tree builder are given after verification.

    Attributes:
        drafted: draft tokens on the deepest path of the tree.
        nodes: draft tokens in the tree.
        accepted: draft tokens accepted, A.
        path: the nodes of the tree from the root to the last accepted one.
        tree: that was verified; None where nobody says.
    """

    drafted: int
    nodes: int
    accepted: int
    path: Sequence[int] = ()
    tree: TokenTree | None = None


class TreeBuilder(ABC):
    """Grows a token tree from the drafter's passes.

    Attributes:
        max_depth: deepest path it can build.
        max_nodes: most nodes it can build, the root counted (sizes the KV cache).
        proposal: how siblings are chosen above temperature 0.
        builders: tree builders that it is made of, one for each of the drafter's ``drafters``.
        shared_suffix: newest tokens that the texts up to two nodes must have in common for one to
            take over what was drafted below the other (GSD); None: all that is below a node comes
            from the drafter's pass at that node.
    """

    __slots__ = ()
    max_depth: int
    max_nodes: int
    proposal: Proposal = "deterministic"
    builders: tuple[TreeBuilder, ...] = ()
    shared_suffix: int | None = None

    @abstractmethod
    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round: the first frontier, or None for a tree of the root alone."""

    @abstractmethod
    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take a pass in; the next frontier, or None when the tree is done."""

    @abstractmethod
    def finish(self) -> TokenTree:
        """Return the tree: parent-closed, root first, within the budget."""

    def update(self, outcome: RoundOutcome) -> None:
        """Take in what came of the tree that was finished last, after verification."""

    def reset(self) -> None:
        """Start a sequence; what was learnt of the one before is forgotten."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What an acceptance rule decided.

    Attributes:
        path: ``[A + 1]`` long, node indices from the root (0) to the last accepted node.
        next_token: 0-d long, the correction or bonus token that follows the path.
    """

    path: Tensor
    next_token: Tensor


@dataclass(frozen=True, slots=True)
class PaddedAcceptance:
    """What an acceptance rule decided, in shapes that do not depend on the decision.

    Attributes:
        path: ``[P]`` long, as in ``Acceptance``, its last node repeated to fill up.
        next_token: 0-d long, as in ``Acceptance``.
    """

    path: Tensor
    next_token: Tensor


class AcceptanceRule(ABC):
    """Decides which path of a verified tree is accepted.

    Attributes:
        lossless: whether the output follows the target's own distribution. A lossy rule is named
            in every report.
    """

    __slots__ = ()
    lossless: bool

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        # An ``accept_padded`` that is inherited while ``__call__`` is not decides something else.
        names = {"__call__", "accept_padded"}
        nearest = next(each for each in cls.__mro__ if names & vars(each).keys())
        if "accept_padded" not in vars(nearest):
            cls.accept_padded = AcceptanceRule.accept_padded  # type: ignore[method-assign]

    @abstractmethod
    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """Accept a path, given the target's ``[N, V]`` logits after every node."""

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """Decide as ``__call__`` does, without waiting for the device.

        Decoding then waits once a round, for the tokens to be written.

        Returns:
            None where that cannot be done, for such a tree or such a sampling.
        """
        return None


class LengthController(ABC):
    """Decides how much to draft."""

    __slots__ = ()

    @abstractmethod
    def budget(self) -> Budget:
        """Return what the round may spend, before drafting."""

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        """Decide after each pass whether to make another one; by default the tree's end decides."""
        return True

    def update(self, outcome: RoundOutcome) -> None:
        """Take in what came of a round, after verification."""

    def begin_sequence(self, sampling: Sampling) -> None:
        """Take in how the tokens of the next sequence are drawn; ``reset`` follows."""

    def reset(self) -> None:
        """Start a sequence."""
