"""The same budget every round."""

from __future__ import annotations

from falcon_lab.builtins import FixedConfig
from falcon_lab.protocols import Budget, BuildContext, DraftOutput, RoundOutcome


class Fixed:
    """Never changes its mind.

    Args:
        config: the budget; what is left out is the tree builder's choice.
        context: not needed.
    """

    def __init__(self, config: FixedConfig, context: BuildContext) -> None:
        del context
        self._budget = Budget(depth=config.depth, nodes=config.nodes, passes=config.passes)

    def budget(self) -> Budget:
        """The budget of every round."""
        return self._budget

    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        """Always: the tree ends within the budget by itself."""
        return True

    def update(self, outcome: RoundOutcome) -> None:
        """Learns nothing."""

    def reset(self) -> None:
        """Remembers nothing."""
