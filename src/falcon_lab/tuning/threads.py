"""How many threads a pass of the target is fastest with: more cores are not always faster.

Threads have to be woken for every product of a pass, and two of them may share one core's units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from falcon_lab.benchmarking.scaling import once
from falcon_lab.benchmarking.scaling_probes import verifying
from falcon_lab.evaluation.benchmark import torch_threads
from falcon_lab.reporting.provenance import usable_cores

if TYPE_CHECKING:
    from falcon_lab.targets.target import Target

ROUNDS = 30
"""Passes of every kind, in turns."""
NODES = 8
"""Rows of the verification that is timed."""
CONTEXT = 128
"""Tokens before them, where the target's context has room for as many."""


@dataclass(frozen=True, slots=True)
class ThreadCost:
    """Median seconds of a pass with so many threads.

    Attributes:
        threads: how many.
        step: a pass over one token.
        verify: a pass over a tree.
    """

    threads: int
    step: float
    verify: float

    @property
    def both(self) -> float:
        """What is to be small: speculation should gain, and not from a slower yardstick."""
        return self.step + self.verify


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, … and all cores."""
    doubled = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*doubled, max(1, cores)]


def time_threads(target: Target, counts: Sequence[int], nodes: int = NODES) -> list[ThreadCost]:
    """Time a step and the verification of a tree with each number of threads, in turns.

    Args:
        target: on a CPU.
        counts: to try.
        nodes: of the tree, the root counted.
    """
    context = min(CONTEXT, target.max_positions - nodes)
    passes = [verifying(target, "context", context, context, size) for size in (1, nodes)]
    taken: dict[int, list[list[float]]] = {count: [] for count in counts}
    for turn in range(ROUNDS + 1):
        for count, turns in taken.items():
            with torch_threads(count):
                seconds = [once(timed, target.device) for timed in passes]
            if turn:  # the first one warms up, and compiles
                turns.append(seconds)
    return [
        ThreadCost(count, *map(median, zip(*turns, strict=True))) for count, turns in taken.items()
    ]


def fastest(costs: Sequence[ThreadCost]) -> ThreadCost:
    """The cheapest; of two alike the one with fewer threads."""
    return min(costs, key=lambda cost: (cost.both, cost.threads))


def choose_threads(target: Target, announce: Callable[[str], None]) -> int:
    """The number of threads to decode with on this machine, and a line about it.

    Args:
        target: on a CPU.
        announce: takes one line for the user.
    """
    costs = time_threads(target, thread_counts(usable_cores()))
    best = fastest(costs)
    listed = ", ".join(
        f"{cost.threads}: {1000 * cost.step:.2f} and {1000 * cost.verify:.2f} ms" for cost in costs
    )
    announce(f"threads, a step and {NODES} rows: {listed}; taking {best.threads}")
    return best.threads
