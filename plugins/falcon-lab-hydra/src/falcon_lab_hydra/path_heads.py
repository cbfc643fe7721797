"""Drafters whose head i reads the target's features and the i + 1 tokens below them.

A round has a pass for every head. The first is about the root, and every later one about all
nodes that are expanded: head i sees, for each of them, the tokens on the path to it.

Shapes: B batch, T tokens, n heads, F frontier blocks, C channels that a head reads, H' those that
its LM head reads, H hidden, V vocabulary (the draft vocabulary, where there is one).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from falcon_lab.drafters.compiled_passes import CompilablePasses
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    DrafterHost,
    DrafterInputs,
    DraftOutput,
    DraftVocabulary,
    Frontier,
    Observation,
    Outputs,
    Prediction,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.passes import (
    Forward,
    ForwardPass,
    Inputs,
    NewPositions,
    PassMaker,
    Shapes,
    size_for,
)
from falcon_lab_hydra.context import FeatureContext, RowsForward

MOST = 64
"""Nodes of a pass that there are compiled ones for."""


class PathDrafter(CompilablePasses, TrainableDrafter):
    """A drafter of n heads, each for the tokens one place deeper than the head before.

    A subclass makes the layers and then calls ``draft_through(EagerPass)``.

    Attributes:
        block: 1.
        needs: target features.
        max_passes: n.
        behind: rows of a round's first pass behind the text's in ``context``.
        context: decoder layers over the target's features; None: there are none.

    Args:
        host: the target.
        heads: n.
        context: see above.
        vocabulary: the tokens that it drafts over; None: all.
    """

    block = 1
    needs = frozenset({"features"})
    behind = 0

    def __init__(
        self,
        host: DrafterHost,
        heads: int,
        context: Backbone | None,
        vocabulary: DraftVocabulary | None,
    ) -> None:
        super().__init__()
        self.host: Any = host
        self.max_passes: int = heads
        self.context = context
        self.draft_vocabulary = vocabulary

    # --- what a subclass computes -------------------------------------------------------------

    @abstractmethod
    def width(self, number: int) -> int:
        """Return C of a head."""

    @abstractmethod
    def hidden(self, number: int, rows: Tensor) -> Tensor:
        """Return what the LM head of head ``number`` reads: ``[..., C]`` -> ``[..., H']``."""

    @abstractmethod
    def logits(self, number: int, hidden: Tensor) -> Tensor:
        """Turn ``[..., H']`` into logits ``[..., V]``."""

    def features(self, hidden: Tensor) -> Tensor | None:
        """Return what of ``[B, T, H']`` predicts the target's features, ``[B, T, H]``, if any."""
        return None

    @abstractmethod
    def training_rows(self, inputs: DrafterInputs, passes: int) -> list[Tensor]:
        """Return what the first heads read of true tokens, ``[B, T, C]`` each."""

    @abstractmethod
    def root_rows(self, root: Tensor) -> Tensor:
        """Return what the first head reads, ``[1, C]``, of a root ``[1]`` long."""

    @abstractmethod
    def node_rows(self, rows: Tensor, frontier: Frontier) -> Tensor:
        """Return what the next head reads of F nodes, ``[F, C]``.

        Args:
            rows: what the head before has read of the nodes of its pass.
            frontier: the nodes.
        """

    # --- training -----------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict by the first head; the others are those of ``unroll``'s later passes.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        if reveal is not None:
            raise FalconLabError(
                f"{type(self).__name__} predicts one token a pass, and has no block of which a "
                "part could be shown; set glancing.name=none"
            )
        return self._prediction(0, *self.training_rows(inputs, 1))

    def unroll(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Iterator[Prediction]:
        """Yield what every head predicts, each from the true tokens of its path."""
        yield self.forward(inputs, reveal)
        for number, rows in enumerate(self.training_rows(inputs, self.max_passes)[1:], start=1):
            yield self._prediction(number, rows)

    def _prediction(self, number: int, rows: Tensor) -> Prediction:
        hidden = self.hidden(number, rows)
        source = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
        return Prediction(
            features=self.features(hidden),
            logits=None,
            label=source + 1 + number,
            source=source,
            slot=torch.zeros_like(source),
            group=source,
            head=lambda some, _: self.logits(number, some),
            hidden=hidden,
        )

    @property
    def weight(self) -> Tensor:
        """Return one of the weights, for their dtype and device."""
        return next(self.parameters())

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens in the precision of the weights."""
        embedded: Tensor = self.host.embed(tokens)
        return embedded.to(self.weight.dtype)

    # --- drafting -----------------------------------------------------------------------------

    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes from now on."""
        self._guesses = [make(GuessForward(self, number)) for number in range(self.max_passes)]
        self._layers: ForwardPass | None = None
        if self.context is not None:
            self._layers = make(RowsForward(self.context, self.behind))
        self._begin()

    def _begin(self) -> None:
        self.newest: Tensor | None = None  # [1, H], the newest feature
        self.root: Tensor | None = None  # [1] long
        self._rows: Tensor | None = None  # of the newest pass
        self._passes = 0
        self.read: FeatureContext | None = None
        if self._layers is not None:
            self.read = FeatureContext(self._layers, self.host.max_positions)

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        self._begin()

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Return the memory of the keys and values of ``context``."""
        return 0 if self._layers is None else self._layers.cache_bytes(self._most(positions, tree))

    @property
    def kv_allocated(self) -> int:
        """Return the bytes that the next text uses again."""
        return 0 if self._layers is None else self._layers.reserved_bytes

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Take that memory when the first position comes, and no more later."""
        if self.read is not None:
            self.read.expect(self._most(positions, tree))

    def _most(self, positions: int, tree: TreeBuilder) -> int:
        return positions + self.behind * (1 + self.max_passes * tree.max_nodes)

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Take new positions in; ``context`` reads them with the next draft, or a prompt's part."""
        assert observation.features is not None
        features = observation.features.to(self.weight.dtype)
        self.newest, self.root, self._rows = features[-1:], observation.tokens[-1:], None
        if self.read is not None:
            self.read.observe(features, observation.remaining)

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Predict what follows the root or F nodes, ``[F, 1, V]``; below the last head nothing."""
        if frontier.tokens.shape[1] == 0:
            if self.root is None:
                raise RuntimeError("draft() needs an observed position: call observe() first")
            rows, self._passes = self.root_rows(self.root), 0
        elif self._rows is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        elif self._passes == self.max_passes:
            return DraftOutput.nothing(frontier, self.host.vocab_size, self.draft_vocabulary)
        else:
            rows = self.node_rows(self._rows, frontier)
        logits, _ = self._guesses[self._passes]([rows])
        self._rows, self._passes = rows, self._passes + 1
        return DraftOutput(logits[:, None], all_proposed=True, vocabulary=self.draft_vocabulary)

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """Return one for every head, and that of ``context``."""
        return self._guesses if self._layers is None else [*self._guesses, self._layers]


class GuessForward(Forward):
    """One head, from ``[F, C]`` to logits ``[F, V]`` and what its LM head reads, ``[F, H']``.

    Args:
        drafter: whose head.
        number: of the head.
    """

    def __init__(self, drafter: PathDrafter, number: int) -> None:
        super().__init__("drafter")
        self.drafter, self.number = drafter, number

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Guess what follows each of F nodes."""
        hidden = self.drafter.hidden(self.number, inputs[0])
        return self.drafter.logits(self.number, hidden), hidden

    def supports(self, inputs: Inputs) -> bool:
        """Return whether the nodes are no more than there are passes for."""
        return inputs[0].shape[0] <= MOST

    def padded(self, shapes: Shapes, sizes: Sequence[int]) -> Shapes:
        """Return a number of nodes that there is a pass for."""
        (count, width), *_ = shapes
        return ((size_for(count, sizes), width),)

    def trimmed(self, outputs: Outputs, inputs: Inputs) -> Outputs:
        """Return what belongs to the nodes that were given."""
        return tuple(output[: inputs[0].shape[0]] for output in outputs)

    def label(self, shapes: Shapes) -> str:
        """Return the name with the head and the number of nodes."""
        return f"{self.name}-head-{self.number}-{shapes[0][0]}-nodes"

    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield the root, which the first head is about."""
        if self.number == 0:
            yield [self.drafter.weight.new_zeros(1, self.drafter.width(0))]
