"""What each kind of component promises, and the values that pass between them.

A plug-in author reads this file and ``plugins/hooks.py``.

Shapes: B batch, T tokens, R prediction rows, N tree nodes, F frontier blocks, k block,
V vocabulary, H hidden, L tapped layers, A accepted draft tokens, M committed positions, P probes.

Positions. ``features[t]`` (h_t) is what the target feeds to its LM head after reading token
x_t, so ``head(h_t)`` predicts x_{t+1}. A drafter reads rows (x_{t+1}, h_t): the token one step
ahead next to the feature, as EAGLE and Falcon do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.sampling import Sampling
from falcon_lab.tree import AuxiliaryNodes, TokenTree

Announce = Callable[[str], None]
"""Takes one line for the user at a time."""


# --- passes of fixed shape ----------------------------------------------------------------------

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
Compiled = Callable[[list[Tensor]], list[Tensor]]
"""Tensors in, tensors out, both flat and in the order of the module's own."""


class PassCompiler(Protocol):
    """Compiles a module: ``compile_ahead``, or what stands in for it in a test."""

    def __call__(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        dynamic_shapes: tuple[Any, ...],
        *,
        name: str,
        announce: Announce,
    ) -> Compiled:
        """Compile a module for inputs like these.

        Args:
            module: may write into its inputs in place; returns tensors.
            inputs: an example.
            dynamic_shapes: as ``torch.export.export`` takes them.
            name: of the pass, for the user.
            announce: takes one line for the user at a time.
        """
        ...


class Recorder(Protocol):
    """Captures device work: ``CudaRecorder``, or what stands in for it where there is no GPU."""

    def capture(self, run: Run) -> Run:
        """Run ``run`` at least once, with what its inputs hold now, and capture it.

        Args:
            run: launches the same kernels on the same tensors whenever it is called.

        Returns:
            The replay. It gives the same output tensors every time, and fills them anew; another
            replay of the same recorder may overwrite them.

        Raises:
            Exception: whatever shows that it cannot be captured; nothing is left of the attempt.
        """
        ...


# --- the target, as components see it -----------------------------------------------------------


class DrafterHost(Protocol):
    """The frozen target, as far as a drafter or an objective may use it.

    A drafter never owns the target's embedding or LM head; it is given them here.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    config: Any  # the Hugging Face configuration of the target
    tokenizer: Any  # its tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings: ``[...]`` long -> ``[..., H]``."""
        ...

    def head(self, features: Tensor) -> Tensor:
        """The LM head with the target's own scaling or soft cap: ``[..., H]`` -> ``[..., V]``."""
        ...

    def copy_head(self) -> nn.Module:
        """A head of the drafter's own that begins as the target's, in float32."""
        ...


# --- drafting -----------------------------------------------------------------------------------


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
        """A tree's own depth and nodes, cut to what may be spent.

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
    """

    tokens: Tensor
    parents: Tensor

    @classmethod
    def root(cls, device: torch.device) -> Frontier:
        """The frontier of a round's first pass."""
        return cls(
            torch.empty(1, 0, dtype=torch.long, device=device),
            torch.full((1,), -1, dtype=torch.long, device=device),
        )


@dataclass(frozen=True)
class DraftOutput:
    """What one drafter pass says about the next tokens of every frontier block.

    Attributes:
        logits: ``[F, rows, V]`` with ``rows <= k``. Row j is about the token j + 1 steps below
            the block's node. ``-inf`` marks a token that is not proposed at all; no rows at all
            means that the drafter has nothing to say.
        features: ``[F, rows, H]`` predicted features, for those who want to look.
        all_proposed: a promise that no token is marked so, which spares a look at the device.
        paths: whole paths of tokens below the root, best first, of a drafter that has such (one
            that looks them up); the tree builder ``paths`` takes them. None: it has none ever.
    """

    logits: Tensor
    features: Tensor | None = None
    all_proposed: bool = False
    paths: Sequence[Sequence[int]] | None = None

    @cached_property
    def log_probabilities(self) -> Tensor:
        """``[F, rows, V]`` float: of the logits, computed once for all who ask (NaN throughout in
        a row that proposes nothing)."""
        return self.logits.float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Observation:
    """Positions that the target has just committed.

    Attributes:
        tokens: ``[M]`` long; ``tokens[i]`` follows the position of ``features[i]``. The last one
            is the newest token, which the target has not read yet (the next tree's root).
        features: ``[M, H]`` target features, or None when the drafter's ``needs`` lacks
            ``"features"``.
        remaining: positions of a long prompt that are still to come before the next ``draft``, in
            observations of their own.
        taps: ``[M, L, H]`` hidden states of the layers that the drafter taps, or
            None when it taps none.
    """

    tokens: Tensor
    features: Tensor | None
    remaining: int = 0
    taps: Tensor | None = None


class Drafter(ABC):
    """Proposes tokens.

    Decoding calls ``reset`` and ``reserve`` at the start of a sequence, ``observe`` with the
    positions of the prompt (in parts, where it is long), and then per round ``draft`` once a pass
    and ``observe`` once. A drafter owns its caches; whatever ``draft`` wrote is provisional until
    the next ``observe``. Everything that has a default may be left as it is.

    Attributes:
        block: tokens that one pass predicts, k.
        needs: what it reads of the target: a subset of ``{"features"}``.
        max_passes: most passes of a round, and trees are drawn no deeper; None: any number.
        taps: layers of the target whose hidden states it reads, with every observation and in
            training (EAGLE-3, DFlash). 0 is what the first decoder layer reads (the embeddings), i
            what decoder layer i puts out, counted from 1. The last one's output is in
            ``features``, after the final norm.
        max_auxiliary: most auxiliary nodes of a round (sizes the KV cache).
    """

    __slots__ = ()
    block: int
    needs: frozenset[str]
    max_passes: int | None = None
    taps: tuple[int, ...] = ()
    max_auxiliary: int = 0

    @abstractmethod
    def reset(self, first: Tensor) -> None:
        """Start a sequence whose first token is ``first`` (a 0-d long tensor)."""

    @abstractmethod
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Draft one pass over the frontier."""

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Take committed positions in and drop what was provisional."""

    # --- memory that grows with the sequence --------------------------------------------------

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Return the memory for a sequence of that many positions, drafted for in such trees.

        Decoding counts it before any is allocated.
        """
        return 0

    @property
    def kv_allocated(self) -> int:
        """Bytes that are allocated already, and that the next sequence uses again."""
        return 0

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Prepare for such a sequence, which ``reset`` has just started."""

    # --- several sequences --------------------------------------------------------------------

    def sequences(self, count: int, positions: int, tree: TreeBuilder) -> DraftSequences | None:
        """Return places for ``count`` sequences that one call drafts for.

        They are apart from the sequence that the drafter itself has.

        Args:
            count: sequences.
            positions: of the longest sequence.
            tree: what is drafted for each; the places take ``count`` times ``kv_bytes``.

        Returns:
            None: every sequence is drafted for by a copy of the drafter that shares its weights.
        """
        return None

    # --- auxiliary nodes ----------------------------------------------------------------------

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        """Return what else the target is to read together with this tree (Lookahead, SPACE).

        Args:
            tree: the draft tokens of the round.
            max_depth: the greatest depth that such a node may have; beyond it the text ends.
        """
        return None

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        """Take in what the target predicts there, before ``observe``, in rounds that have any.

        Args:
            tree: the draft tokens and, behind them, the auxiliary nodes.
            logits: ``[N, V]``, one row a node.
            acceptance: what was accepted of the draft tokens.
        """

    # --- compiled passes (``decoding.compile``) -----------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """Whether its passes are compiled."""
        return False

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """Return the same drafter with the same weights, drafting through compiled passes.

        One that cannot have them says why in one line, and returns itself.

        Args:
            announce: takes one line for the user at a time.
            compiler: makes the passes on a CPU; None: inductor, ahead of time.
            recorder: captures graphs; None: CUDA's, on a GPU alone.
        """
        if is_trainable(self):
            announce(f"{type(self).__name__} is not compiled: it has no passes that could be")
        return self

    def prepare(self, longest: int) -> None:
        """Compile now, before it is timed, what rounds of up to so many new tokens need."""

    # --- training on its own predictions (``distillation.unroll``) ----------------------------

    def unroll(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Iterator[Prediction]:
        """Yield what the passes of a drafting round predict, one after the other, without end.

        The first is what calling it gives (``reveal`` is for that pass alone). Each later pass
        continues from the drafter's own predictions and the true tokens, as a later drafting pass
        would; gradients flow through all of them.
        """
        raise FalconLabError(
            f"{type(self).__name__} cannot be trained on its own predictions (unroll); "
            "set distillation.unroll=1"
        )

    @property
    def unrolls(self) -> bool:
        """Whether it has an ``unroll`` of its own."""
        return type(self).unroll is not Drafter.unroll

    def compile_training(self, compiler: Callable[[Any], Any] = torch.compile) -> None:
        """Send the part of a training pass that it pays for through a compiler.

        Weights keep their names. ``falcon_lab.model.torch_compile.Compiled`` does it with a way
        back.
        """
        raise FalconLabError(
            f"distillation.compile: {type(self).__name__} does not say what of it can be compiled "
            "(compile_training); set distillation.compile=false"
        )


class TrainableDrafter(nn.Module, Drafter):
    """A drafter with weights, whose ``forward`` is the training pass."""

    @abstractmethod
    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict every row of the batch. The same generator state gives the same block phases.

        ``reveal`` rows are those of the prediction that the same inputs gave without it.
        """


class DraftSequences(Protocol):
    """Places for B sequences that one drafter drafts for, each as if it were alone.

    The methods are those of ``Drafter``, with the place that is meant.
    """

    def reset(self, place: int, first: Tensor) -> None:
        """Start a sequence in that place, whatever was there before; ``first`` is a 0-d long."""
        ...

    def observe(self, place: int, observation: Observation) -> None:
        """Take a sequence's committed positions in and drop what was provisional."""
        ...

    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Draft one pass over the frontiers of some places; return the output of each of them.

        All of them are at the same pass of their rounds. A place that drafts no further is left
        out until its next round.
        """
        ...

    def move(self, source: int, goal: int) -> None:
        """Move the sequence of place ``source`` to place ``goal``, whose own has ended."""
        ...


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What a drafter is trained on: T rows (x_{t+1}, h_t) of packed documents.

    Attributes:
        tokens: ``[B, T]`` long, the token one step ahead of each row.
        features: ``[B, T, H]`` target features (noise already added).
        documents: ``[B, T]`` long, document of each row; rows see only their own document.
        positions: ``[B, T]`` long, position of each row in its document, 0-based.
        generator: the source of all randomness of this step (block phases, noise).
        taps: ``[B, T, L, H]`` hidden states of the layers that the drafter taps,
            without noise, or None when it taps none.
    """

    tokens: Tensor
    features: Tensor
    documents: Tensor
    positions: Tensor
    generator: torch.Generator
    taps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """R rows of a drafter's training output.

    Attributes:
        features: ``[B, R, H]``, or None for a drafter that predicts tokens alone.
        logits: ``[B, R, V]``; None asks for ``head``, for as many rows at a time as there is room.
        label: ``[B, R]`` long, the position t whose target feature h_t (and whose next-token
            distribution) the row predicts; out of range means no label.
        source: ``[B, R]`` long, the newest position whose true input the row was meant to see.
            A row counts only where source and label lie in one document.
        slot: ``[B, R]`` long, place in the block, 0..k-1 (0 is the next token).
        group: ``[B, R]`` long, block of the row, equal for the rows of one block, unique in the
            sequence.
        head: ``[n, H]`` features and ``[n]`` slots of any rows -> ``[n, V]``, where the drafter has
            heads of its own; None: ``host.head(features)``.
        hidden: ``[B, R, C]``, what ``head`` reads in place of the features, where the rows are no
            predictions of the target's.
    """

    features: Tensor | None
    logits: Tensor | None
    label: Tensor
    source: Tensor
    slot: Tensor
    group: Tensor
    head: Callable[[Tensor, Tensor], Tensor] | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reveal:
    """Labels that a glancing schedule shows to the drafter in place of its inputs.

    Attributes:
        mask: ``[B, R]`` bool, the rows of the first pass's ``Prediction`` that are shown.
        tokens: ``[B, R]`` long, the token that the row's label feature predicts.
        features: ``[B, R, H]`` the label features themselves.
    """

    mask: Tensor
    tokens: Tensor
    features: Tensor


@dataclass(frozen=True, slots=True)
class GlanceRows:
    """What a glancing schedule chooses from.

    Attributes:
        wrong: ``[B, R]`` bool, valid rows where the first pass and the target disagree.
        valid: ``[B, R]`` bool, rows that have a label and count in the loss.
        slot: ``[B, R]`` long, place in the block.
        group: ``[B, R]`` long, block of the row.
        block: k.
    """

    wrong: Tensor
    valid: Tensor
    slot: Tensor
    group: Tensor
    block: int


class GlancingSchedule(ABC):
    """Decides how much of the labels, and which of them, the second pass may see.

    Attributes:
        token_source: revealed tokens are the target's argmax or the data's own tokens.
        keep_revealed_in_loss: upstream Falcon True, GLAT False.
    """

    __slots__ = ()
    token_source: Literal["target", "data"] = "target"
    keep_revealed_in_loss: bool = True

    @abstractmethod
    def ratio(self, progress: float) -> float:
        """Return λ at ``progress`` in [0, 1] of the training. 0 skips the first pass."""

    @abstractmethod
    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Choose the rows to show: ``[B, R]`` bool."""

    def counts(self, rows: GlanceRows) -> Tensor:
        """Choose the rows that the loss has: ``[B, R]`` bool, all valid ones by default.

        ``rows.wrong`` is about the pass that the loss is computed from.
        """
        return rows.valid

    @property
    def chooses_rows(self) -> bool:
        """Whether ``counts`` leaves any row out; else that pass need not be compared first."""
        return type(self).counts is not GlancingSchedule.counts


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Student and teacher side by side, for the rows that count only (R' of them).

    Attributes:
        student_features: ``[R', H]`` or None.
        student_logits: ``[R', V]``.
        teacher_features: ``[R', H]``.
        teacher_logits: ``[R', V]``.
        tokens: ``[R']`` long, the data's next token (-100 where there is none).
        generator: for sampled labels.
        slot: ``[R']`` long, place in the block, 0..k-1.
    """

    student_features: Tensor | None
    student_logits: Tensor
    teacher_features: Tensor
    teacher_logits: Tensor
    tokens: Tensor
    generator: torch.Generator
    slot: Tensor


class Objective(ABC):
    """Turns labelled rows into named loss terms.

    A term of a row depends on that row alone: the rows of a step come in as many calls as their
    logits need room (``distillation.logits_mib``), and the terms of all calls count together.

    Attributes:
        weights: term name -> weight; the loss is the weighted sum of the terms' means.
    """

    __slots__ = ()
    weights: Mapping[str, float]

    @abstractmethod
    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Compute each term per row, ``[R']``. Names are those of ``weights``."""


# --- one round of decoding ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a tree builder knows when a round starts.

    Attributes:
        root: 0-d long, the newest token, not yet read by the target.
        budget: what the round may spend.
        sampling: how tokens are drawn from the target (greedy or T > 0).
        generator: source of randomness for sampled proposals.
    """

    root: Tensor
    budget: Budget
    sampling: Sampling
    generator: torch.Generator


class TreeBuilder(ABC):
    """Grows a token tree from the drafter's passes.

    Attributes:
        max_depth: deepest path it can build.
        max_nodes: most nodes it can build, the root counted (sizes the KV cache).
    """

    __slots__ = ()
    max_depth: int
    max_nodes: int

    @abstractmethod
    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round: the first frontier, or None for a tree of the root alone."""

    @abstractmethod
    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take a pass in; the next frontier, or None when the tree is done."""

    @abstractmethod
    def finish(self) -> TokenTree:
        """Return the tree: parent-closed, root first, within the budget."""


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
    """What an acceptance rule decided, in shapes that tell nothing about it.

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


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a controller learns after verification.

    Attributes:
        drafted: draft tokens on the deepest path of the tree.
        nodes: draft tokens in the tree.
        accepted: draft tokens accepted, A.
    """

    drafted: int
    nodes: int
    accepted: int


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

    def reset(self) -> None:
        """Start a sequence."""


# --- what builders are given --------------------------------------------------------------------


class ComponentBuilder(Protocol):
    """The registered components, as far as another component may use them."""

    def knows(self, kind: str, name: str) -> bool:
        """Whether some plug-in registered ``name``."""
        ...

    def names(self, kind: str) -> list[str]:
        """What is registered of a kind."""
        ...

    def build(self, kind: str, node: Mapping[str, Any], context: BuildContext) -> Any:
        """The component that a YAML node ``{name: …}`` describes."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Handed to every component's builder beside its configuration.

    Attributes:
        host: the frozen target.
        block: k of the drafter that the component works with (0 while building the drafter).
        max_passes: passes that this drafter can make a round; None: any number.
        components: builds a component that is made of others; the registry fills it in.
    """

    host: DrafterHost
    block: int = 0
    max_passes: int | None = None
    components: ComponentBuilder | None = None

    @classmethod
    def of(cls, host: DrafterHost, drafter: Drafter) -> BuildContext:
        """For components that are to work with this drafter."""
        return cls(host, drafter.block, drafter.max_passes)

    @property
    def deepest(self) -> int | None:
        """Draft tokens on the longest path that a round's passes can reach; None: no limit."""
        return None if self.max_passes is None else self.max_passes * self.block

    def reach(self, depth: int) -> int:
        """``depth``, or ``deepest`` where that is less."""
        return depth if self.deepest is None else min(depth, self.deepest)


def is_trainable(drafter: object) -> bool:
    """Whether a drafter has weights to train."""
    return isinstance(drafter, nn.Module) and any(True for _ in drafter.parameters())


BASES: Mapping[str, type] = {
    "drafter": Drafter,
    "schedule": GlancingSchedule,
    "tree_builder": TreeBuilder,
    "acceptance_rule": AcceptanceRule,
    "controller": LengthController,
    "objective": Objective,
}
"""The class of each kind of component that is an object; the registry fills in its defaults."""
