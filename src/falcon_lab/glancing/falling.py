"""What glancing schedules share: a ratio that goes in a straight line, and two switches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from falcon_lab.protocols import BuildContext

if TYPE_CHECKING:
    from falcon_lab.builtins import CsgdConfig


class Falling:
    """A ``GlancingSchedule`` but for which rows it shows (``reveal``).

    Args:
        config: the ratio's ends and the switches.
        context: gives k. With k = 1 there is nobody in a block whom a row that is shown could help.
    """

    def __init__(self, config: CsgdConfig, context: BuildContext) -> None:
        self.token_source = cast(Literal["target", "data"], config.tokens)
        self.keep_revealed_in_loss = config.revealed_in_loss
        self._start, self._end = config.start, config.end
        self._possible = context.block != 1

    def ratio(self, progress: float) -> float:
        """λ goes linearly from ``start`` to ``end``, and no further; 0 where k = 1."""
        if not self._possible:
            return 0.0
        return self._start + (self._end - self._start) * min(max(progress, 0.0), 1.0)
