"""Price a round, as a function of the tree's nodes and of every pass's blocks.

Shapes: n draft tokens of a tree, F blocks of a pass, k block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from falcon_lab.studies.tune.texts import ReplayedRound


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        verify: (draft tokens, seconds) of a target pass, ascending; straight lines between, and
            the last line continues beyond.
        first: a round's first drafter pass, with growing the tree.
        later: a later pass of one block.
        block: one more block in a later pass.
        asking: what the ``confidence`` controller needs for one pass.
        fixed: acceptance, commit and the rest of the loop.
        builders: tree builder -> what a pass costs more than with a template.
        step: a step of plain decoding.
        prefill: until the first token, when drafting.
        plain_prefill: the same in plain decoding.
    """

    verify: list[tuple[float, float]]
    first: float
    later: float
    block: float
    asking: float
    fixed: float
    step: float
    prefill: float = 0.0
    plain_prefill: float = 0.0
    builders: dict[str, float] = field(default_factory=dict)

    def verifying(self, nodes: float) -> float:
        """Estimate the seconds of a target pass over the root and ``nodes`` draft tokens."""
        points = self.verify
        if nodes <= points[0][0] or len(points) == 1:
            return points[0][1]
        behind = next((at for at, (m, _) in enumerate(points) if nodes <= m), len(points) - 1)
        (n, low), (m, high) = points[behind - 1 : behind + 1]
        return low + (high - low) * (nodes - n) / (m - n)

    def slope(self, nodes: int) -> float:
        """What a draft token costs on average in trees of up to so many."""
        return max(0.0, self.verifying(nodes) - self.verifying(0)) / max(nodes, 1)

    def drafting(self, blocks: Sequence[float]) -> float:
        """The passes of a round, each with its blocks."""
        if not blocks:
            return 0.0
        return self.first + sum(self.later + self.block * (f - 1) for f in blocks[1:])

    def round(self, replayed: ReplayedRound, *, builder: str = "", asked: bool = False) -> float:
        """Estimate the seconds of one round of any tree.

        Args:
            replayed: what it did.
            builder: name of the tree builder.
            asked: whether a controller decides after every pass.
        """
        passes = len(replayed.blocks)
        looked = passes * self.asking if asked else 0.0
        return (
            self.verifying(replayed.nodes)
            + self.drafting(replayed.blocks)
            + passes * self.builders.get(builder, 0.0)
            + looked
            + self.fixed
        )
