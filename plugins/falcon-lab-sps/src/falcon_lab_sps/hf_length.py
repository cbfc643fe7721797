"""How much Hugging Face's assisted generation drafts.

``AssistedCandidateGenerator.update_candidate_strategy`` with the schedule "heuristic_transient":
all accepted, and the next round drafts two tokens more; else one less, but always one.
"""

from __future__ import annotations

from falcon_lab.interfaces import Budget, BuildContext, LengthController, RoundOutcome
from falcon_lab_sps import HfLengthConfig


class HfLength(LengthController):
    """Raise the draft length while everything is accepted, and lower it otherwise.

    It limits the depth of what the tree builder drafts, so the tree must be as deep as the length
    may become. Every text begins with ``start``.

    Args:
        config: the numbers.
        context: not needed.
    """

    def __init__(self, config: HfLengthConfig, context: BuildContext) -> None:
        del context
        self._config = config
        self.length = config.start

    def budget(self) -> Budget:
        """Return a budget of the present length."""
        return Budget(depth=self.length)

    def update(self, outcome: RoundOutcome) -> None:
        """Raise the length after a whole path was accepted, and lower it after any other."""
        if outcome.drafted == 0:
            return
        if outcome.accepted == outcome.drafted:
            self.length += self._config.up
        else:
            self.length = max(1, self.length - self._config.down)

    def reset(self) -> None:
        """Return to the initial length."""
        self.length = self._config.start
