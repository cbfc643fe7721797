"""What options are worth: a method with them answers some prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.schema import MethodConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import Setup
from falcon_lab.studies.search.space import Point, merged
from falcon_lab.timing import Stopwatch

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.decoding.generation import Generation

OBJECTIVES = ("speed", "cost")
"""Tokens a second as they are measured, and tokens a decode step's work by a model of it."""


@dataclass(frozen=True)
class Attempt:
    """Holds what a point was worth.

    Attributes:
        point: the options.
        score: by the objective; 0 where they were refused.
        tokens: that were written.
        rounds: verifications.
        passes: drafter passes.
        drafted: draft tokens that were verified.
        accepted: of them.
        seconds: that it took.
        refused: why, if the options were.
    """

    point: Point
    score: float
    tokens: int = 0
    rounds: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Scorer:
    """Lets a method with other options answer prompts.

    Attributes:
        setup: assembles its engine.
        nodes: the method's own: ``drafter``, ``tree``, ``acceptance`` and ``controller``.
        prompts: that are answered.
        tokens: most of an answer.
        objective: one of ``OBJECTIVES``.
        node_cost: of a draft token in a verification, in decode steps, for the objective ``cost``.
    """

    setup: Setup
    nodes: Mapping[str, Mapping[str, Any]]
    prompts: Sequence[EncodedPrompt]
    tokens: int
    objective: str
    node_cost: float

    def __call__(self, point: Point) -> Attempt:
        """Score a point; what is refused is worth nothing.

        Raises:
            FalconLabError: the drafter does not say what a pass of it costs.
        """
        try:
            nodes = merged(self.nodes, point, self.setup.components)
            drafter, _ = self.setup.drafter(MethodConfig(drafter=nodes["drafter"]))
            engine = self.setup.engine(drafter, nodes)
        except FalconLabError as error:
            return Attempt(point, 0.0, refused=str(error))
        with Stopwatch(self.setup.target.device) as watch:
            answers = self._answers(engine)
        rounds = [done for answer in answers for done in answer.rounds]
        tokens = sum(len(answer.tokens) for answer in answers)
        found = Attempt(
            point,
            0.0,
            tokens,
            len(rounds),
            sum(done.passes for done in rounds),
            sum(done.nodes for done in rounds),
            sum(done.accepted for done in rounds),
            watch.wall,
        )
        return replace(found, score=self._score(found, drafter.pass_cost))

    def _answers(self, engine: SpeculativeEngine) -> list[Generation]:
        """Return the answers to all prompts; side by side where nobody looks at the clock."""
        setup, evaluation = self.setup, self.setup.experiment.evaluation
        if self.objective == "speed":
            return [setup.answer(engine, prompt, tokens=self.tokens) for prompt in self.prompts]
        generators = [torch.Generator(setup.target.device) for _ in self.prompts]
        return engine.generate_batch(
            [prompt.tokens([]) for prompt in self.prompts],
            batch_size=len(self.prompts),
            max_new_tokens=min(self.tokens, evaluation.max_new_tokens),
            sampling=setup.sampling,
            generators=[each.manual_seed(evaluation.seed) for each in generators],
            stop=setup.stop,
        )

    def _score(self, found: Attempt, pass_cost: float | None) -> float:
        if self.objective == "speed":
            return found.tokens / found.seconds
        if pass_cost is None:
            raise FalconLabError(
                f"the drafter {self.nodes['drafter']['name']} does not say what a pass costs "
                "(Drafter.pass_cost); use --by speed"
            )
        work = found.rounds + self.node_cost * found.drafted + pass_cost * found.passes
        return found.tokens / max(work, 1e-9)
