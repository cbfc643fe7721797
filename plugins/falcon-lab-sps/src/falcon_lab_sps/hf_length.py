"""How much Hugging Face's assisted generation drafts.

``AssistedCandidateGenerator.update_candidate_strategy`` with the schedule "heuristic_transient":
all accepted, and the next round drafts two tokens more; else one less, but always one.
"""

from __future__ import annotations

from falcon_lab.interfaces import Budget, BuildContext, LengthController, RoundOutcome
from falcon_lab_sps import HfLengthConfig


class HfLength(LengthController):
    """A length that goes up while everything is accepted.

    It limits the depth of what the tree builder drafts by itself, so the tree must be as deep as
    the length may become. Every text begins with ``start``.

    Args:
        config: the numbers.
        context: not needed.
    """

    def __init__(self, config: HfLengthConfig, context: BuildContext) -> None:
        del context
        self._config = config
        self.length = config.start

    def budget(self) -> Budget:
        """Paths of the present length."""
        return Budget(depth=self.length)

    def update(self, outcome: RoundOutcome) -> None:
        """Longer after a whole path was accepted, shorter after any other; a round without
        drafts tells nothing."""
        if outcome.drafted == 0:
            return
        if outcome.accepted == outcome.drafted:
            self.length += self._config.up
        else:
            self.length = max(1, self.length - self._config.down)

    def reset(self) -> None:
        """Back to the start."""
        self.length = self._config.start
