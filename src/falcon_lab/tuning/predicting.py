"""What a row of the comparison promises: its rounds replayed on the texts, priced by the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.evaluation.statistics import Interval, paired_ratio
from falcon_lab.tuning.costs import Costs
from falcon_lab.tuning.texts import Text, replay


@dataclass(frozen=True)
class Promise:
    """Figures of a method over all texts; every text begins with a prefill and its token.

    Attributes:
        tau: tokens a round, the target's own one included.
        nodes: draft tokens verified a round.
        passes: of the drafter, a round.
        milliseconds: a round.
        rate: tokens a second of all rounds, the prefill left out.
        tokens_per_second: the prefill counted.
        speedup: over plain decoding, the prefill counted; 95 % interval over texts.
    """

    tau: float
    nodes: float
    passes: float
    milliseconds: float
    rate: float
    tokens_per_second: float
    speedup: Interval

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def promise(
    engine: SpeculativeEngine, texts: Sequence[Text], costs: Costs, *, builder: str, asked: bool
) -> Promise:
    """Replay an engine on the texts.

    Args:
        engine: whose drafter, builder and controller are used.
        texts: the target's own.
        costs: of this machine.
        builder: name of the tree builder.
        asked: whether the controller looks at the passes.
    """
    rounds = [
        list(replay(text, engine.drafter, engine.tree_builder, engine.controller)) for text in texts
    ]
    tokens = [sum(r.emitted for r in of_text) for of_text in rounds]
    seconds = [
        sum(costs.round(r, builder=builder, asked=asked) for r in of_text) for of_text in rounds
    ]
    plain = [costs.plain_prefill + costs.step * count for count in tokens]
    wall = [costs.prefill + each for each in seconds]
    written = [count + 1 for count in tokens]
    count = max(sum(map(len, rounds)), 1)
    return Promise(
        tau=sum(tokens) / count,
        nodes=sum(r.nodes for of in rounds for r in of) / count,
        passes=sum(len(r.blocks) for of in rounds for r in of) / count,
        milliseconds=1000 * sum(seconds) / count,
        rate=sum(tokens) / max(sum(seconds), 1e-12),
        tokens_per_second=sum(written) / sum(wall),
        speedup=paired_ratio((plain, written), (wall, written)),
    )
