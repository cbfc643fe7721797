"""Length controllers: how much a round may draft.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

import math

from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, LengthController
from falcon_lab.plugins.builtins import ConfidenceConfig, FixedConfig


class Fixed(LengthController):
    """Allow the same budget in every round.

    Args:
        config: the budget; what is left out is the tree builder's choice.
        context: not needed.
    """

    def __init__(self, config: FixedConfig, context: BuildContext) -> None:
        del context
        self._budget = Budget(depth=config.depth, nodes=config.nodes, passes=config.passes)

    def budget(self) -> Budget:
        """Return the budget of every round."""
        return self._budget


class Confidence(Fixed):
    """Draft on while the likeliest path is likely to be accepted as a whole.

    The drafter's own probabilities of its first candidates are multiplied along the path of a
    round (the criterion of assisted generation in Hugging Face's library, there token by token).
    A pass that only extends a path which will not be accepted costs its time and its nodes; a
    path that is as good as certain is worth more passes than a fixed number. Which tokens are
    accepted does not depend on it, so what is lossless stays so.

    Args:
        config: the budget and the threshold.
        context: not needed.
    """

    def __init__(self, config: ConfidenceConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._lowest = math.log(config.threshold)
        self._log_confidence = 0.0

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        """Return whether the likeliest path so far is at least as likely as the threshold.

        Args:
            passes: of this round, the one just made counted.
            output: of that pass, ``[F, k, V]`` logits; its first block continues the likeliest
                path.
        """
        if passes == 1:
            self._log_confidence = 0.0
        self._log_confidence += float(output.log_probabilities[0].amax(-1).sum())
        return self._log_confidence >= self._lowest
