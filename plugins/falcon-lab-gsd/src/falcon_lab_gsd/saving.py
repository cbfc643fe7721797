"""What merging saves: the same texts by graphs that merge more or less, and by one that is a tree.

Shapes: P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from falcon_lab import testing
from falcon_lab.interfaces import BuildContext, Drafter
from falcon_lab.model.target import Target
from falcon_lab_gsd import GsdConfig
from falcon_lab_gsd.graph import GsdTree, Work

THRESHOLDS: tuple[int | None, ...] = (None, 0, 1, 2)
"""Values of R; None never merges."""


@dataclass(frozen=True)
class Saving:
    """What one value of R took.

    Attributes:
        repeat_threshold: R.
        tokens: that were written.
        work: what they took.
    """

    repeat_threshold: int | None
    tokens: int
    work: Work


def savings(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    config: GsdConfig,
    *,
    new: int,
    thresholds: Sequence[int | None] = THRESHOLDS,
) -> Iterator[Saving]:
    """Write greedy texts with every R, and yield what it took.

    Args:
        target: writes.
        drafter: of one token a pass.
        prompts: ``[P]`` long each.
        config: the other options.
        new: tokens of a text at the most.
        thresholds: the values of R.

    Raises:
        FalconLabError: the drafter has more than one token a pass.
    """
    context = BuildContext.of(target, drafter)
    for threshold in thresholds:
        tree = GsdTree(replace(config, repeat_threshold=threshold), context)
        engine = testing.engine(target, drafter, tree=tree)
        texts = [testing.write(engine, prompt.tolist(), new).tokens for prompt in prompts]
        yield Saving(threshold, sum(map(len, texts)), tree.work)


def lines(found: Iterator[Saving]) -> Iterator[str]:
    """Yield a table, a line a value of R as it is computed; everything is of a round."""
    names = ("passes", "blocks", "nodes", "copies", "saved")
    yield f"{'R':>5}{'rounds':>8}{'tokens':>8}" + "".join(f"{name:>8}" for name in names)
    for saving in found:
        facts: dict[str, Any] = asdict(saving.work)
        rounds = max(1, facts["rounds"])
        label = "never" if saving.repeat_threshold is None else str(saving.repeat_threshold)
        yield f"{label:>5}{facts['rounds']:8}{saving.tokens / rounds:8.2f}" + "".join(
            f"{facts[name] / rounds:8.2f}" for name in names
        )
    yield (
        "blocks: tokens that the drafter read; copies: verified nodes behind a merged edge; saved: "
        "copies below which something was drafted, for which the drafter read nothing"
    )
