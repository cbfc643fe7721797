"""Choose the limits of a tree that follows the drafter: by replaying it, as ranks do not tell.

Shapes: k block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from falcon_lab.builtins import ConfidenceConfig, DynamicTreeConfig, FixedConfig
from falcon_lab.controllers.confidence import Confidence
from falcon_lab.controllers.fixed import Fixed
from falcon_lab.protocols import LengthController
from falcon_lab.trees.dynamic import DynamicTree
from falcon_lab.tuning.costs import Costs
from falcon_lab.tuning.measuring import Bench
from falcon_lab.tuning.predicting import Promise, promise
from falcon_lab.tuning.texts import Text

NODES = (6, 8, 10, 12, 16, 24, 32, 48, 64)
THRESHOLDS = (0.1, 0.2, 0.3, 0.5)
BEAMS = (1, 2, 4)
PATIENCE = 2
"""Sizes in a row that may bring nothing before no larger one is tried."""


@dataclass(frozen=True)
class Growth:
    """A dynamic tree and what it promises.

    Attributes:
        tree: its options.
        threshold: of the ``confidence`` controller; None is ``fixed``.
        promise: on the texts.
    """

    tree: DynamicTreeConfig
    threshold: float | None
    promise: Promise


def best_growth(
    bench: Bench, texts: Sequence[Text], costs: Costs, *, nodes: int, depth: int
) -> Growth:
    """The limits with the most expected tokens a second, found one after the other.

    First nodes and threshold together, with a beam of two; nodes are added while it helps. Then
    the beam.

    Args:
        bench: what is replayed.
        texts: the target's own.
        costs: of this machine.
        nodes: most draft tokens.
        depth: longest path.
    """

    def attempt(size: int, beam: int, threshold: float | None) -> Growth:
        tree = DynamicTreeConfig(nodes=size, beam=beam, width=4, depth=depth)
        return Growth(tree, threshold, _promise(bench, texts, costs, tree, threshold))

    found: list[Growth] = []
    for threshold in (None, *THRESHOLDS):
        rates: list[float] = []
        for size in [n for n in NODES if n <= nodes] or [nodes]:
            found.append(attempt(size, 2, threshold))
            rates.append(found[-1].promise.rate)
            if len(rates) - rates.index(max(rates)) > PATIENCE:
                break
    best = max(found, key=_rate)
    beams = [attempt(best.tree.nodes, b, best.threshold) for b in BEAMS if b != best.tree.beam]
    return max([best, *beams], key=_rate)


def _rate(growth: Growth) -> float:
    return growth.promise.rate


def _promise(
    bench: Bench,
    texts: Sequence[Text],
    costs: Costs,
    tree: DynamicTreeConfig,
    threshold: float | None,
) -> Promise:
    engine = bench.engine(DynamicTree(tree, bench.context))
    controller: LengthController = Fixed(FixedConfig(), bench.context)
    if threshold is not None:
        controller = Confidence(ConfidenceConfig(threshold=threshold), bench.context)
    engine.controller = controller
    return promise(engine, texts, costs, builder="dynamic", asked=threshold is not None)
