"""Thompson sampling of how long to draft (arXiv 2406.03853): Beta-TS and Calibration-TS.

Whether the next draft token is accepted is a coin of unknown bias θ. After each token θ is drawn
from its posterior, and a coin of that bias decides whether to draft on: where little is known or
most was accepted it explores, and it stops early in a text that is hard to foresee.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

from random import Random

from falcon_lab.interfaces import (
    Budget,
    BuildContext,
    DraftOutput,
    LengthController,
    RoundOutcome,
)
from falcon_lab_eesd import BetaConfig, CalibrationConfig


class BetaTs(LengthController):
    """Draw θ from a Beta posterior over the draft tokens of the text.

    A round tells of the tokens that were accepted, and of the one that was not, if there is one;
    those behind it were never tried.

    Attributes:
        accepted: α, the prior's counted.
        refused: β, the prior's counted.

    Args:
        config: priors and seed.
        context: not needed.
    """

    def __init__(self, config: BetaConfig, context: BuildContext) -> None:
        del context
        self._config = config
        self.reset()

    def reset(self) -> None:
        """Return to the prior, and to the first draw."""
        self.accepted, self.refused = self._config.accepted, self._config.refused
        self._random = Random(self._config.seed)

    def budget(self) -> Budget:
        """Return a budget of the greatest depth."""
        return Budget(depth=self._config.most)

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        """Draw θ, and toss a coin of that bias."""
        odds = self._random.betavariate(*self.posterior(output))
        return self._random.random() < odds

    def posterior(self, output: DraftOutput) -> tuple[float, float]:
        """Return α and β after a pass."""
        return self.accepted, self.refused

    def update(self, outcome: RoundOutcome) -> None:
        """Count the tokens of the deepest path that verification tells of."""
        self.accepted += outcome.accepted
        self.refused += outcome.accepted < outcome.drafted


class CalibrationTs(BetaTs):
    """Add to the posterior how likely the drafter thinks its newest token.

    With probability c it counts like κ·c accepted and κ·(1 - c) refused tokens, for that draw
    alone.

    Args:
        config: priors, seed, κ and the temperature of the calibration.
        context: not needed.
    """

    def __init__(self, config: CalibrationConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._weight, self._temperature = config.weight, config.temperature

    def posterior(self, output: DraftOutput) -> tuple[float, float]:
        """Return α and β after a pass, by ``[F, k, V]`` logits, the likeliest block first."""
        if not self._weight or not output.logits.shape[1]:
            return self.accepted, self.refused
        likeliest = self._confidence(output)
        sure, unsure = self._weight * likeliest, self._weight * (1.0 - likeliest)
        return self.accepted + sure, self.refused + unsure

    def _confidence(self, output: DraftOutput) -> float:
        """Return the calibrated probability of the likeliest last token of the first block."""
        if self._temperature == 1.0:
            return min(1.0, float(output.log_probabilities[0, -1].amax().exp()))
        warm = output.logits[0, -1].float() / self._temperature
        return min(1.0, float(warm.softmax(-1).amax()))
