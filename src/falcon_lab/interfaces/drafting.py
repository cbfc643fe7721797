"""What a drafter does and is given, and what every component is built with.

Shapes: B sequences, M committed positions, N tree nodes, F frontier blocks, k block, L tapped
layers, V vocabulary, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces.decoding import (
    Acceptance,
    DraftOutput,
    Frontier,
    RoundContext,
    TreeBuilder,
)
from falcon_lab.interfaces.layers import LayerPlan, TargetLayers
from falcon_lab.interfaces.training import DrafterInputs, FirstWeights, Prediction, Reveal
from falcon_lab.interfaces.vocabulary import DraftVocabulary
from falcon_lab.tree import AuxiliaryNodes, TokenTree

Announce = Callable[[str], None]
"""Called with one line for the user at a time."""
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
            dynamic_shapes: as for ``torch.export.export``.
            name: of the pass, for the user.
            announce: is called with one line for the user at a time.
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


class DrafterHost(Protocol):
    """The frozen target, as far as a drafter or an objective may use it.

    A drafter never owns the target's embedding or LM head; it is given them here.
    """

    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]  # tokens that end a text
    config: Any  # the Hugging Face configuration of the target
    tokenizer: Any  # its tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: ``[...]`` long -> ``[..., H]``."""
        ...

    def head(self, features: Tensor) -> Tensor:
        """Apply the LM head, scaled or capped as the target does: ``[..., H]`` -> ``[..., V]``."""
        ...

    def norm(self, states: Tensor) -> Tensor:
        """Apply the final norm, which makes features of the layers' states: ``[..., H]``.

        Raises:
            FalconLabError: the model has none of the names that are known.
        """
        ...

    def pass_cost(self, plan: LayerPlan) -> float:
        """Return what a pass through a part of the layers and the LM head costs, in decode steps.

        Counted are the weights that it multiplies by.
        """
        ...

    def run_upper(self, layer: int, states: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the layers from one on, without a KV cache; gradients go through them to ``states``.

        Args:
            layer: the first that is run, counted from 0.
            states: ``[B, T, H]``, what it reads.
            positions: ``[B, T]`` long.
            mask: ``[B, T, T]`` bool, which of these positions each one attends to.

        Returns:
            ``[B, T, H]``, as the LM head reads them.
        """
        ...

    def narrow_head(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Copy the LM head's rows of some tokens, ``[n]`` long, to lie together: ``[..., n]``.

        Nothing of it is trained or saved.

        Raises:
            FalconLabError: the LM head is none that has a row for every token.
        """
        ...

    def copy_head(self, tokens: Tensor | None = None) -> nn.Module:
        """Make a head of the drafter's own that begins as the target's, in float32.

        Args:
            tokens: ``[n]`` long, whose rows it has; None: all.
        """
        ...


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
        max_auxiliary: most auxiliary nodes of a round, whatever the tree; 0: it never has any.
        lower_layers: the target's first layers that its passes run over draft tokens
            (``TargetLayers.run`` of ``LayerPlan(last=lower_layers)``, each token attending to its
            ancestors and itself). Verification then runs the rest alone; 0: it runs all.
            In training row t of such a drafter may read the tap at x_{t+1}, which it knows while
            drafting.
        pass_cost: what a drafting pass over one token costs in decode steps of the target, by a
            model of the work; None: not known.
        pretrained: whether its weights, if it has any, were trained before it was built (a model
            from the hub), so that it may decode untrained.
        drafters: drafters that it is made of. Each has a tree of its own (``TreeBuilder.builders``)
            and a part of every ``Frontier`` and ``DraftOutput``.
    """

    __slots__ = ()
    block: int
    needs: frozenset[str]
    max_passes: int | None = None
    taps: tuple[int, ...] = ()
    max_auxiliary: int = 0
    lower_layers: int = 0
    pass_cost: float | None = None
    pretrained: bool = False
    drafters: tuple[Drafter, ...] = ()

    @abstractmethod
    def reset(self, first: Tensor) -> None:
        """Start a sequence whose first token is ``first`` (a 0-d long tensor)."""

    @abstractmethod
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Draft one pass over the frontier."""

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Take committed positions in and drop what was provisional."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that its logits are about; None: all of the target's.

        It is the attribute ``draft_vocabulary``, where a drafter has one.
        """
        found: DraftVocabulary | None = getattr(self, "draft_vocabulary", None)
        return found

    def begin_round(self, context: RoundContext) -> None:
        """Take in what the round may spend and how its tokens are drawn, before its first pass.

        A round that drafts nothing has none. One that is asked to draft without it, as a
        benchmark does, drafts as much as it can.
        """

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

    # --- the target's own layers -----------------------------------------------------------------

    def attach(self, layers: TargetLayers) -> None:
        """Take the target's layers, over the KV cache of the sequence that is drafted for.

        Called before a sequence starts, and when it has moved; the drafter's own sequence is in
        place 0.
        """

    def provisional(self, tree: TreeBuilder) -> int:
        """Return how many positions of the target's KV cache drafting such a tree takes at most.

        Verification begins where drafting began, and takes them again.
        """
        return 0

    # --- auxiliary nodes ----------------------------------------------------------------------

    def most_auxiliary(self, tree: TreeBuilder) -> int:
        """Return the most auxiliary nodes that there can be beside such a tree.

        It sizes the KV cache, and is ``max_auxiliary`` by default.
        """
        return self.max_auxiliary

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
            logits: ``[N, V]``, one distribution a node.
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
            announce: is called with one line for the user at a time.
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
        """Yield what the passes of a drafting round predict, one after the other.

        There is no end to them, unless ``max_passes`` is one.

        The first is what calling it gives (``reveal`` is for that pass alone). Each later pass
        continues from the drafter's own predictions and the true tokens, as a later drafting pass
        would; gradients flow through all of them. Slot j of pass n (0 is the first) that began
        behind position t has the source t and the label t + 1 + n·k + j.

        A training has as many passes as ``distillation.unroll`` says, 1 by default, and validation
        the first alone: weights of a pass that is not asked for are not trained, which a warning
        says after the first step.
        """
        raise FalconLabError(
            f"{type(self).__name__} cannot be trained on its own predictions (unroll); "
            "set distillation.unroll=1"
        )

    @property
    def unrolls(self) -> bool:
        """Whether it has an ``unroll`` of its own."""
        return type(self).unroll is not Drafter.unroll

    # --- first weights of a training (``distillation.least_squares``) --------------------------

    def first_weights(self) -> FirstWeights:
        """Return what solves for the weights that a training begins with.

        It is asked for before there are data, too.

        Raises:
            FalconLabError: no such solution is known for the drafter, or not as it is configured.
        """
        raise FalconLabError(
            f"distillation.least_squares: {type(self).__name__} has no solution to begin at "
            "(first_weights); set distillation.least_squares=0"
        )

    # --- a compiled training pass (``distillation.compile``) ----------------------------------

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


@runtime_checkable
class BeginsRounds(Protocol):
    """Places whose sequences learn what a round may spend: a ``Drafter.begin_round`` for each."""

    def begin_round(self, place: int, context: RoundContext) -> None:
        """Begin a round of the sequence in that place."""
        ...


def begins_rounds(drafter: Drafter) -> bool:
    """Whether a drafter, or one that it is made of, has a ``begin_round`` of its own."""
    if drafter.drafters:
        return any(map(begins_rounds, drafter.drafters))
    # Asked of the object: what stands for a drafter (in a trace) has its methods, not its class.
    return getattr(drafter.begin_round, "__func__", None) is not Drafter.begin_round


def is_trainable(drafter: object) -> bool:
    """Whether a drafter has weights to train."""
    return isinstance(drafter, nn.Module) and any(True for _ in drafter.parameters())


class ComponentBuilder(Protocol):
    """The registered components, as far as another component may use them."""

    def knows(self, kind: str, name: str) -> bool:
        """Whether some plug-in registered ``name``."""
        ...

    def names(self, kind: str) -> list[str]:
        """List what is registered of a kind."""
        ...

    def owner(self, kind: str, name: str) -> str:
        """Return whose a component is, for messages."""
        ...

    def build(self, kind: str, node: Mapping[str, Any], context: BuildContext) -> Any:
        """Build the component that a YAML node ``{name: …}`` describes."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Handed to every component's builder beside its configuration.

    Attributes:
        host: the frozen target.
        block: k of the drafter that the component works with (0 while building the drafter).
        max_passes: passes that this drafter can make a round; None: any number.
        components: builds a component that is made of others; the registry fills it in.
        token_counts: counts how often each of the target's tokens occurs in the answers that a
            drafter is about to be trained on, ``[V]`` long; None where it is not to be trained.
        parts: the contexts of components that work with the drafters that this drafter is made of.
        saved: gives the drafter that is saved in a folder, or that the run has trained (None);
            None: there is no run.
    """

    host: DrafterHost
    block: int = 0
    max_passes: int | None = None
    components: ComponentBuilder | None = None
    token_counts: Callable[[], Tensor] | None = None
    parts: tuple[BuildContext, ...] = ()
    saved: Callable[[str | None], Drafter] | None = None

    @classmethod
    def of(cls, host: DrafterHost, drafter: Drafter) -> BuildContext:
        """Make the context of components that work with this drafter."""
        parts = tuple(cls.of(host, part) for part in drafter.drafters)
        return cls(host, drafter.block, drafter.max_passes, parts=parts)

    def draft_vocabulary(
        self, size: int | None, *, own_head: bool = False
    ) -> DraftVocabulary | None:
        """Return the draft vocabulary of a drafter that is being built; None: all tokens.

        Args:
            size: of the option; None, and as many as the target has or more, are all tokens.
            own_head: whether the drafter has an LM head of its own.

        Raises:
            ValueError: there is no room for the tokens that are always in it.
            FalconLabError: the target's LM head is none of which rows can be copied.
        """
        if size is None or size >= self.host.vocab_size:
            return None
        counts = None if self.token_counts is None else self.token_counts()
        return DraftVocabulary(self.host, size, counts, own_head=own_head)

    @property
    def deepest(self) -> int | None:
        """Draft tokens on the longest path that a round's passes can reach; None: any number."""
        return None if self.max_passes is None else self.max_passes * self.block

    def reach(self, depth: int) -> int:
        """Return ``depth``, or ``deepest`` where that is less."""
        return depth if self.deepest is None else min(depth, self.deepest)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Handed to an engine's builder beside its configuration.

    Attributes:
        target: the model, a ``falcon_lab.model.target.Target``.
        decoding: how engines run, the ``decoding`` section of the experiment.
        components: as in ``BuildContext``.
    """

    target: Any
    decoding: Any
    components: ComponentBuilder | None = None


@dataclass(frozen=True, slots=True)
class TargetContext:
    """Handed to a target's builder beside its configuration.

    Attributes:
        announce: is called with one line for the user at a time.
        components: as in ``BuildContext``.
    """

    announce: Announce
    components: ComponentBuilder | None = None
