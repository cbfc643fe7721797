"""DiffuSpec's adaptive draft length (arXiv 2510.02358, equations 9 to 11)."""

from __future__ import annotations

from collections.abc import Collection

from falcon_lab.interfaces import Budget, BuildContext, LengthController, RoundOutcome
from falcon_lab_diffusion import AdlConfig


class AdaptiveLength(LengthController):
    """Draft as much as the drafter has to say, and more where all of it is accepted.

    What was generated in a round is its path up to the first end-of-text token. The moving averages
    of what was generated and of what was accepted begin at 0 in every text; the next length is the
    first of them, with ``step`` more where the second is no less, rounded to a whole number between
    ``least`` and ``most``.

    Args:
        config: the numbers.
        context: gives the tokens that end a text.
    """

    def __init__(self, config: AdlConfig, context: BuildContext) -> None:
        self._config = config
        self._ends: Collection[int] = context.host.eos_ids
        self.reset()

    def reset(self) -> None:
        """Return to the longest length."""
        self.length = self._config.most
        self.generated = self.accepted = 0.0

    def budget(self) -> Budget:
        """Return a budget of the present length."""
        return Budget(depth=self.length)

    def update(self, outcome: RoundOutcome) -> None:
        """Choose the next length; a round without draft tokens leaves it as it is."""
        if not outcome.drafted:
            return
        config, rho = self._config, self._config.decay
        self.generated = (1 - rho) * self.generated + rho * self._count(outcome)
        self.accepted = (1 - rho) * self.accepted + rho * outcome.accepted
        more = config.step if self.accepted >= self.generated else 0
        self.length = min(max(round(self.generated + more), config.least), config.most)

    def _count(self, outcome: RoundOutcome) -> int:
        """Return the tokens of the first path before its end-of-text token."""
        if outcome.tree is None or not self._ends:
            return outcome.drafted
        path = outcome.tree.tokens[1 : outcome.drafted + 1].tolist()
        return next((at for at, token in enumerate(path) if token in self._ends), len(path))
