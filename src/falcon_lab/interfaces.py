"""What each kind of component promises, and the values that pass between them.

A plug-in author reads this file and ``plugins/hooks.py``.

Shapes: B batch, T tokens, R prediction rows, N tree nodes, F frontier blocks, k block,
V vocabulary, H hidden, L tapped layers, A accepted draft tokens, M committed positions, P probes.

Positions. ``features[t]`` (h_t) is what the target feeds to its LM head after reading token
x_t, so ``head(h_t)`` predicts x_{t+1}. A drafter reads rows (x_{t+1}, h_t): the token one step
ahead next to the feature, as EAGLE and Falcon do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from falcon_lab.sampling import Sampling
    from falcon_lab.tree import TokenTree

Proposal = Literal["deterministic", "sampled"]
"""How draft tokens were chosen: the top candidates, or samples from a known q."""


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
        taps: ``[M, L, H]`` hidden states of the layers that the drafter taps (``TapsLayers``), or
            None when it taps none.
    """

    tokens: Tensor
    features: Tensor | None
    remaining: int = 0
    taps: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Trainable drafters are also ``nn.Module`` s and ``TrainableDrafter`` s.

    Decoding calls ``reset`` with the first token of a sequence, ``observe`` with the positions of
    the prompt (in parts, where it is long), and then per round ``draft`` once a pass and
    ``observe`` once. A drafter owns its caches; whatever ``draft`` wrote is provisional until the
    next ``observe``.

    Attributes:
        block: tokens that one pass predicts, k.
        needs: what it reads of the target: a subset of ``{"features"}``.

    One whose rounds have a limited number of passes says so in ``max_passes``; it is asked for no
    more, and trees are drawn no deeper.
    """

    block: int
    needs: frozenset[str]

    def reset(self, first: Tensor) -> None:
        """Start a sequence whose first token is ``first`` (a 0-d long tensor)."""
        ...

    def draft(self, frontier: Frontier) -> DraftOutput:
        """One pass over the frontier."""
        ...

    def observe(self, observation: Observation) -> None:
        """Take committed positions in and drop what was provisional."""
        ...


@runtime_checkable
class TapsLayers(Protocol):
    """What a ``Drafter`` also has that reads hidden states of layers in the middle of the target.

    It is given them with every observation, and in training.

    Attributes:
        taps: the layers. 0 is what the first decoder layer reads (the embeddings), i what decoder
            layer i puts out, counted from 1. The last one's output is in ``features``, after the
            final norm.
    """

    taps: tuple[int, ...]


@runtime_checkable
class KeepsRows(Protocol):
    """What a ``Drafter`` also has whose memory grows with the sequence.

    Decoding counts that memory before it takes any, and calls ``reserve`` after ``reset``. One that
    keeps memory from one sequence to the next says how many bytes in ``kv_held``.
    """

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Memory for a sequence of that many positions, drafted for in such trees."""
        ...

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Expect such a sequence."""
        ...


@runtime_checkable
class Compilable(Protocol):
    """What a ``Drafter`` also has whose passes can be compiled (``decoding.compile``).

    ``falcon_lab.compiling`` has what its passes may be made of: ``ahead`` and ``rows`` on a CPU,
    ``recording`` and ``graphs`` on a GPU.
    """

    @property
    def is_compiled(self) -> bool:
        """Whether they are."""
        ...

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler = ...,
        recorder: Recorder | None = None,
    ) -> Self:
        """The same drafter with the same weights, drafting through compiled passes.

        One that cannot have them says why in one line, and gives itself.

        Args:
            announce: takes one line for the user at a time.
            compiler: makes the passes on a CPU (``compile_ahead``).
            recorder: captures graphs; None: on a GPU alone (``recorder_for``).
        """
        ...

    def prepare(self, longest: int) -> None:
        """Compile what rounds need that add up to so many tokens, before they are timed."""
        ...


@dataclass(frozen=True, slots=True)
class Probes:
    """Tokens that the target reads beside a tree, and that are never accepted.

    Attributes:
        tokens: ``[P]`` long.
        depth: ``[P]`` long, positions behind the root's; at least 0.
        sees: ``[P, C + P]`` bool, what each one sees of the tree's C nodes (the root among them)
            and of the probes (itself among them). The text before the root is seen by all.
    """

    tokens: Tensor
    depth: Tensor
    sees: Tensor


@runtime_checkable
class ReadsProbes(Protocol):
    """What a ``Drafter`` also has that asks the target more than its drafts do (Lookahead, SPACE).

    Attributes:
        max_probes: most probes of a round (sizes the KV cache).
    """

    max_probes: int

    def probe(self, tree: TokenTree, room: int) -> Probes | None:
        """What else the target is to read together with this tree.

        Args:
            tree: the drafts of the round.
            room: the greatest depth that a probe may have; beyond it the text ends.
        """
        ...

    def harvest(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        """What the target said, before ``observe``; only of rounds that had probes.

        Args:
            tree: the drafts and, behind them, the probes.
            logits: ``[N, V]``, one row a node.
            acceptance: what was kept of the drafts.
        """
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
        taps: ``[B, T, L, H]`` hidden states of the layers that the drafter taps (``TapsLayers``),
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


@runtime_checkable
class TrainableDrafter(Drafter, Protocol):
    """A drafter with weights: an ``nn.Module`` whose ``forward`` is the training pass."""

    def __call__(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict every row of the batch. The same generator state gives the same block phases.

        ``reveal`` rows are those of the prediction that the same inputs gave without it.
        """
        ...

    def parameters(self, recurse: bool = True) -> Any:
        """The trainable weights, as ``nn.Module.parameters``."""
        ...


@runtime_checkable
class Unrolls(Protocol):
    """What a ``TrainableDrafter`` also has that can be trained on its own predictions.

    It is what ``distillation.unroll`` asks for.
    """

    def unroll(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Iterator[Prediction]:
        """What the passes of a drafting round predict, one after the other, without end.

        First what calling it gives (``reveal`` is for that pass alone). Each later pass goes on
        from the drafter's own predictions and the true tokens, as a later drafting pass would;
        gradients flow through all of them.
        """
        ...


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


class GlancingSchedule(Protocol):
    """Decides how much of the labels, and which of them, the second pass may see.

    Attributes:
        token_source: revealed tokens are the target's argmax or the data's own tokens.
        keep_revealed_in_loss: upstream Falcon True, GLAT False.
    """

    token_source: Literal["target", "data"]
    keep_revealed_in_loss: bool

    def ratio(self, progress: float) -> float:
        """λ at ``progress`` in [0, 1] of the training. 0 skips the first pass."""
        ...

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """``[B, R]`` bool: the rows to show."""
        ...


@runtime_checkable
class ChoosesRows(Protocol):
    """What a ``GlancingSchedule`` also has that leaves rows out of the loss."""

    def counts(self, rows: GlanceRows) -> Tensor:
        """``[B, R]`` bool: the valid rows that the loss is to have.

        ``rows.wrong`` is about the very pass that is learnt from.
        """
        ...


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


class Objective(Protocol):
    """Turns labelled rows into named loss terms.

    A term of a row depends on that row alone: the rows of a step come in as many calls as their
    logits need room (``distillation.logits_mib``), and the terms of all calls count together.

    Attributes:
        weights: term name -> weight; the loss is the weighted sum of the terms' means.
    """

    weights: Mapping[str, float]

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Each term per row, ``[R']``. Names are those of ``weights``."""
        ...


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


class TreeBuilder(Protocol):
    """Grows a token tree from the drafter's passes.

    Attributes:
        max_depth: deepest path it can build.
        max_nodes: most nodes it can build, the root counted (sizes the KV cache).
    """

    max_depth: int
    max_nodes: int

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round: the first frontier, or None for a tree of the root alone."""
        ...

    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take a pass in; the next frontier, or None when the tree is done."""
        ...

    def finish(self) -> TokenTree:
        """The tree: parent-closed, root first, within the budget."""
        ...


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


@runtime_checkable
class AcceptsOnDevice(Protocol):
    """What an ``AcceptanceRule`` also has that can decide without waiting for the device.

    Decoding then asks it this way, and waits once a round: for the tokens to be written.
    """

    def accept_padded(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> PaddedAcceptance | None:
        """As calling the rule; None where it cannot, for such a tree or such a sampling."""
        ...


class AcceptanceRule(Protocol):
    """Decides which path of a verified tree is kept.

    Attributes:
        lossless: whether the output follows the target's own distribution. A lossy rule is named
            in every report.
    """

    lossless: bool

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        """``logits`` are the target's, ``[N, V]``, one row per tree node."""
        ...


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


class LengthController(Protocol):
    """Decides how much to draft."""

    def budget(self) -> Budget:
        """Before drafting: what the round may spend."""
        ...

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        """After each pass: whether another one is worth it."""
        ...

    def update(self, outcome: RoundOutcome) -> None:
        """After verification."""
        ...

    def reset(self) -> None:
        """Before a new sequence."""
        ...


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
        return cls(host, drafter.block, getattr(drafter, "max_passes", None))

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
