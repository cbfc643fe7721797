"""How many threads a pass of the target is fastest with: more cores are not always faster.

Threads have to be woken for every product of a pass, and two of them may share one core's units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from falcon_lab.evaluation.benchmark import torch_threads
from falcon_lab.reporting.provenance import usable_cores
from falcon_lab.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.targets.kv_cache import KVCache
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
        verify: a pass over a chain.
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
    """Time a step and the verification of a chain with each number of threads, in turns.

    Args:
        target: on a CPU.
        counts: to try.
        nodes: of the chain, the root counted.
    """
    context = min(CONTEXT, target.max_positions - nodes)
    chain = _chain(nodes)
    cache = target.new_cache(context + nodes)
    target.prefill(torch.arange(context) % target.vocab_size, cache)
    taken: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in counts}
    for turn in range(ROUNDS + 1):
        for count, (steps, verified) in taken.items():
            with torch_threads(count):
                step = _seconds(lambda: target.step(chain.tokens[0], cache), cache)
                verify = _seconds(lambda: target.verify(chain, cache), cache)
            if turn:  # the first one warms up, and compiles
                steps.append(step)
                verified.append(verify)
    return [ThreadCost(count, median(s), median(v)) for count, (s, v) in taken.items()]


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


def _chain(nodes: int) -> TokenTree:
    parents = torch.arange(nodes) - 1
    return TokenTree(
        tokens=torch.arange(nodes),
        parents=parents,
        depth=torch.arange(nodes),
        ancestors=torch.ones(nodes, nodes, dtype=torch.bool).tril(),
        proposal="deterministic",
        log_q=torch.zeros(nodes),
    )


def _seconds(run: Callable[[], object], cache: KVCache) -> float:
    """Seconds of a pass, after which the cache is as before."""
    before, start = cache.length, perf_counter()
    run()
    taken = perf_counter() - start
    cache.truncate(before)
    return taken
