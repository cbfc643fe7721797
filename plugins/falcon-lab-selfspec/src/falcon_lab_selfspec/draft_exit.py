"""Draft & Verify's adaptive draft exit (arXiv 2309.08168, section 3.3)."""

from __future__ import annotations

import math

from falcon_lab.interfaces import (
    Budget,
    BuildContext,
    DraftOutput,
    LengthController,
    RoundOutcome,
)
from falcon_lab.sampling import Sampling
from falcon_lab_selfspec import DraftExitConfig

GREEDY, SAMPLED = 0.8, 0.5
"""The paper's first thresholds."""


class DraftExit(LengthController):
    """Stop drafting behind an unlikely token, and adapt what is unlikely to what is accepted.

    A token below the threshold γ is kept, and none is drafted behind it. After every verification
    the rate of accepted tokens moves on, and γ with it: up where too few are accepted, down where
    enough are and drafting stopped of itself. Every text begins with the first γ.

    Args:
        config: the paper's numbers.
        context: not needed.

    Attributes:
        threshold: γ.
        rate: AR, the moving rate of accepted tokens.
    """

    def __init__(self, config: DraftExitConfig, context: BuildContext) -> None:
        del context
        self._config = config
        self._first = GREEDY if config.threshold is None else config.threshold
        self.reset()

    def begin_sequence(self, sampling: Sampling) -> None:
        """Choose the first threshold, where the configuration leaves it to the way of drawing."""
        if self._config.threshold is None:
            self._first = GREEDY if sampling.greedy else SAMPLED

    def reset(self) -> None:
        """Return to the first threshold, and forget what was accepted."""
        self.threshold, self.rate = self._first, 0.0
        self._exited = False

    def budget(self) -> Budget:
        """Return a budget of the most draft tokens."""
        return Budget(depth=self._config.most)

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        """Return whether the newest tokens are as likely as the threshold.

        Args:
            passes: not needed.
            output: of the pass just made, ``[F, k, V]`` logits; the likeliest token of a row of its
                first block stands for the drafted one, which it is unless that is sampled.
        """
        likeliest = output.log_probabilities[0].amax(-1)
        lowest = float(likeliest.amin()) if len(likeliest) else -math.inf
        self._exited = math.exp(lowest) < self.threshold
        return not self._exited

    def update(self, outcome: RoundOutcome) -> None:
        """Move rate and threshold on; a round without drafts tells nothing."""
        if outcome.drafted == 0:
            return
        config, former = self._config, self.threshold
        matched = outcome.accepted / outcome.drafted
        self.rate = _mixed(config.rate_memory, self.rate, matched)
        wanted = former
        if self.rate < config.target_rate:
            wanted = former + config.step
        elif self._exited:  # otherwise all that was allowed has been drafted
            wanted = former - config.step
        self.threshold = _mixed(config.threshold_memory, former, wanted)
        self._exited = False


def _mixed(memory: float, former: float, new: float) -> float:
    return memory * former + (1 - memory) * new
