"""Plain decoding: one target forward per token, on the same cache as speculative decoding.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.generation import Generation, OnRound, Round, clock_for
from falcon_lab.decoding.memory import check_kv_memory
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.sampling import Sampling

if TYPE_CHECKING:
    from falcon_lab.model.target import Target


class PlainEngine:
    """What every speed-up is measured against.

    Args:
        target: the model.
        decoding: how to run it; None takes the defaults.
    """

    lossless = True

    def __init__(self, target: Target, *, decoding: DecodingConfig | None = None) -> None:
        self.target = target
        self.decoding = decoding or DecodingConfig()

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
        """Continue ``prompt``, ``[P]`` long. Arguments and errors are ``SpeculativeEngine``'s."""
        target = self.target
        transcript = begin(prompt, max_new_tokens, target.max_positions, stop)
        rounds: list[Round] = []
        clock = clock_for(target.device)
        length = len(prompt) + transcript.remaining
        check_kv_memory(
            target.kv_bytes,
            length,
            limit_gib=self.decoding.kv_memory,
            device=target.device,
            held=target.kv_allocated,
        )
        cache = target.new_cache(length)
        passes = target.read(prompt, cache, chunk=self.decoding.prefill_chunk)
        output = deque(passes, maxlen=1).pop()  # the last one's logits are all that is wanted
        token = sampling.draw(output.logits[-1], generator)
        kept = transcript.extend([int(token)])
        clock.lap("prefill")
        while True:
            if on_round is not None:
                on_round(kept, 0, None, None)
            if transcript.finish is not None:
                return Generation(transcript.tokens, transcript.finish, rounds, clock.seconds)
            clock.lap("overhead")
            output = target.step(token, cache)
            clock.lap("verify")
            token = sampling.draw(output.logits[-1], generator)
            kept = transcript.extend([int(token)])
            clock.lap("accept")
            rounds.append(Round(nodes=0, depth=0, passes=0, accepted=0, emitted=1))
