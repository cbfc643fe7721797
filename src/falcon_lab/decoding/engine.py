"""Speculative decoding, one sequence at a time: the loop is ``SpeculativeEngine.generate``.

Shapes: P prompt tokens, N tree nodes, A accepted draft tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.accepting import accept
from falcon_lab.decoding.generation import Clock, DeviceClock, Generation, OnRound, Round, clock_for
from falcon_lab.decoding.memory import check_kv_memory
from falcon_lab.decoding.observing import observation, with_auxiliary
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.interfaces import (
    AcceptanceRule,
    Budget,
    Drafter,
    LengthController,
    RoundContext,
    RoundOutcome,
    TreeBuilder,
)
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.model.kv_cache import KVCache
    from falcon_lab.model.target import Target, TargetOutput


class SpeculativeEngine:
    """A target, and the four components that make it faster.

    Args:
        target: the frozen model; the engine's own is tapped where the drafter asks for it.
        drafter: proposes tokens.
        tree_builder: grows a tree of them.
        rule: accepts a path of the tree.
        controller: says how much to draft.
        decoding: how to run them; None takes the defaults.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tree_builder: TreeBuilder,
        rule: AcceptanceRule,
        controller: LengthController,
        *,
        decoding: DecodingConfig | None = None,
    ) -> None:
        self.target = target.tapped(drafter.taps)
        self.drafter = drafter
        self.tree_builder = tree_builder
        self.rule = rule
        self.controller = controller
        self.decoding = decoding or DecodingConfig()

    @property
    def max_nodes(self) -> int:
        """Most nodes of a round, auxiliary nodes counted."""
        return self.tree_builder.max_nodes + self.drafter.max_auxiliary

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own."""
        return self.rule.lossless

    @torch.inference_mode()
    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        stop: StopCondition,
        on_round: OnRound | None = None,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: ``[P]`` long, at least one token, on the target's device.
            max_new_tokens: most tokens to add; fewer when the target's context ends before.
            sampling: how tokens are drawn from the target.
            generator: the source of all randomness, on the target's device.
            stop: what ends the text.
            on_round: told of every round's tokens, and of the first token.

        Raises:
            FalconLabError: the prompt is empty or longer than the target's context, or there is
                no memory for its keys and values.
        """
        target = self.target
        transcript = begin(prompt, max_new_tokens, target.max_positions, stop)
        rounds: list[Round] = []
        clock = clock_for(target.device)
        self.controller.reset()
        cache = self._begin(prompt[0], len(prompt) + transcript.remaining)
        output = self._prefill(prompt, cache)
        root = sampling.draw(output.logits[-1], generator)
        unobserved = prompt[len(prompt) - len(output.features) + 1 :]
        self._observe(torch.cat((unobserved, root[None])), output)
        kept = transcript.extend([int(root)])
        if on_round is not None:
            on_round(kept, 0, None, None)
        clock.lap("prefill")

        while transcript.finish is None:
            room = transcript.remaining - 1
            budget = at_most(self.controller.budget(), depth=room)
            context = RoundContext(root, budget, sampling, generator)
            tree, passes = self._draft(context, room, clock)

            start = cache.length
            output = target.verify(tree, cache)
            clock.lap("verify")

            added = accept(self.rule, tree, output.logits, sampling, generator)
            accepted, root = added.acceptance, added.acceptance.next_token
            kept = transcript.extend(added.listed)
            clock.lap("accept")

            cache.commit(start, accepted.path, last=added.last)
            if tree.auxiliary:
                self.drafter.observe_auxiliary(tree, output.logits, accepted)
            self._observe(added.tokens, output, accepted.path)
            outcome = RoundOutcome(tree.max_depth, tree.drafted, len(added.listed) - 1)
            self.controller.update(outcome)
            clock.lap("commit")

            drafted = min(outcome.accepted, len(kept))
            counts = (outcome.nodes, outcome.drafted, passes, drafted, len(kept), tree.auxiliary)
            rounds.append(Round(*counts))
            if on_round is not None:
                on_round(kept, drafted, tree, accepted)
            clock.lap("overhead")
        return Generation(transcript.tokens, transcript.finish, rounds, clock.seconds)

    def _begin(self, first: Tensor, length: int) -> KVCache:
        """Start a sequence of up to ``length`` tokens, if there is memory for it; its cache."""
        target, drafter, tree = self.target, self.drafter, self.tree_builder
        nodes = self.max_nodes

        def bytes_of(length: int) -> int:
            return target.kv_bytes(length + nodes) + drafter.kv_bytes(length, tree)

        check_kv_memory(
            bytes_of,
            length,
            limit_gib=self.decoding.kv_memory,
            device=target.device,
            held=target.kv_allocated + drafter.kv_allocated,
        )
        drafter.reset(first)
        drafter.reserve(length, tree)
        return target.new_cache(length + nodes)

    def _prefill(self, prompt: Tensor, cache: KVCache) -> TargetOutput:
        """Read the prompt. The drafter is told of every pass but the last one.

        What follows the last one's tokens is still to be drawn.
        """
        left = len(prompt)
        for output in self.target.read(prompt, cache, chunk=self.decoding.prefill_chunk):
            first, left = len(prompt) - left, left - len(output.features)
            if left:
                known = prompt[first + 1 : len(prompt) - left + 1]
                self._observe(known, output, remaining=left)
        return output

    def _draft(
        self, context: RoundContext, room: int, clock: Clock | DeviceClock
    ) -> tuple[TokenTree, int]:
        """Drafter and tree builder take turns; the tree and the number of passes."""
        passes = 0
        frontier = self.tree_builder.start(context)
        while frontier is not None:
            clock.lap("overhead")
            output = self.drafter.draft(frontier)
            clock.lap("draft")
            passes += 1
            frontier = self.tree_builder.grow(output)
            if frontier is not None and not self.controller.keep_going(passes, output):
                break
        tree = with_auxiliary(self.drafter, self.tree_builder.finish(), room)
        clock.lap("overhead")
        return tree, passes

    def _observe(
        self,
        tokens: Tensor,
        output: TargetOutput,
        path: Tensor | None = None,
        *,
        remaining: int = 0,
    ) -> None:
        seen = observation(self.drafter, tokens, output, path, remaining=remaining)
        self.drafter.observe(seen)


def at_most(budget: Budget, *, depth: int) -> Budget:
    """The budget with its depth limited.

    A round adds one token more than its depth, so that with ``depth`` one less than what is still
    to be written nothing is drafted in vain, and no node lies beyond the target's last position.
    """
    return replace(budget, depth=depth if budget.depth is None else min(budget.depth, depth))
