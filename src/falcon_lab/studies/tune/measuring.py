"""Measure what rounds cost on this machine: real rounds of trees of many shapes, in turns.

Every figure comes from the engine's own clock, so whatever makes the engine faster is included. The
number of threads is chosen first: more cores are not always faster, because threads have to be
woken for every product of a pass, and two of them may share one core's units.

Shapes: n draft tokens of a tree, F blocks of a pass, k block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from falcon_lab.controllers import Confidence, Fixed
from falcon_lab.decoding.assembling import prepare
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.generation import Generation, Round
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, Drafter, Frontier, TreeBuilder
from falcon_lab.measure.pass_costs import once, verifying
from falcon_lab.measure.provenance import usable_cores
from falcon_lab.plugins.builtins import ConfidenceConfig, FixedConfig
from falcon_lab.sampling import Sampling
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.texts import Text, replay
from falcon_lab.timing import Stopwatch, in_turns, rotated, torch_threads
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import Path, checked
from falcon_lab.trees.template_tree import TemplateTree

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

ROUNDS = 30
"""Passes of every kind, in turns."""
NODES = 8
"""Nodes of the verification that is timed."""
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
        """What is to be small: speculation should gain, and not from a slower baseline."""
        return self.step + self.verify


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4, … and ``most``, which is at least 1."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), max(1, most)]


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
    for turn, count in in_turns(counts, ROUNDS, warm_up=1):  # which compiles, too
        with torch_threads(count):
            seconds = [once(timed, target.device) for timed in passes]
        if turn >= 0:
            taken[count].append(seconds)
    return [
        ThreadCost(count, *map(median, zip(*turns, strict=True))) for count, turns in taken.items()
    ]


def fastest(costs: Sequence[ThreadCost]) -> ThreadCost:
    """Return the cheapest; of two alike the one with fewer threads."""
    return min(costs, key=lambda cost: (cost.both, cost.threads))


def choose_threads(target: Target, announce: Callable[[str], None]) -> int:
    """Choose the number of threads to decode with on this machine, and announce it.

    Args:
        target: on a CPU.
        announce: is called with one line for the user.
    """
    costs = time_threads(target, doubling(usable_cores()))
    best = fastest(costs)
    listed = ", ".join(
        f"{cost.threads}: {1000 * cost.step:.2f} and {1000 * cost.verify:.2f} ms" for cost in costs
    )
    announce(f"threads, a step and {NODES} nodes: {listed}; taking {best.threads}")
    return best.threads


TOKENS = 32
"""Tokens that an engine writes at a time."""
SHORTEST = 8
"""Tokens that a text must at least have to be gone on from."""
BLOCKS = (2, 4, 8)
"""F that are measured beside 1."""
LOOKS = 30
"""Times that the controller is timed."""


@dataclass(frozen=True)
class Sample:
    """A generation; means over its rounds, seconds.

    Attributes:
        nodes: draft tokens verified.
        later: passes after the first.
        extra: blocks of later passes beyond one each.
        verify: the target's pass.
        draft: passes and tree growing, with what little else the loop does.
        fixed: acceptance and commit.
        prefill: before the first round.
    """

    nodes: float
    later: float
    extra: float
    verify: float
    draft: float
    fixed: float
    prefill: float


def shapes(block: int, nodes: int, vocabulary: int) -> dict[str, list[Path]]:
    """Trees that tell apart what nodes, passes and blocks cost.

    Args:
        block: k.
        nodes: the largest tree.
        vocabulary: a node has no more children.
    """
    found: dict[str, list[Path]] = {
        f"{n} nodes": [(r,) for r in range(n)] for n in doubling(min(nodes, vocabulary))
    }
    for passes in (1, 2, 4):
        found[f"{passes} passes"] = _chain((0,), passes * block)
    for count in (f for f in BLOCKS if f <= min(nodes, vocabulary)):
        found[f"{count} blocks"] = [p for r in range(count) for p in _chain((r,), block + 1)]
    return found


def _chain(start: Path, depth: int) -> list[Path]:
    return [start + (0,) * more for more in range(depth - len(start) + 1)]


@dataclass(frozen=True)
class Bench:
    """Holds what costs are measured with.

    Attributes:
        base: the engine whose tree is replaced; it always drafts the whole tree.
        stop: when a text ends.
    """

    base: SpeculativeEngine
    stop: StopCondition

    @property
    def target(self) -> Target:
        """Return the model, tapped where the drafter asks for it."""
        return self.base.target

    @property
    def drafter(self) -> Drafter:
        """Return the drafter, with block k."""
        return self.base.drafter

    @property
    def context(self) -> BuildContext:
        """Return what components are built with."""
        return BuildContext.of(self.target, self.drafter)

    def engine(self, builder: TreeBuilder) -> SpeculativeEngine:
        """Return the engine with another tree."""
        return self.base.with_tree(builder)

    def write(self, engine: Any, text: Text) -> Generation:
        """Continue the text's prompt greedily."""
        written: Generation = engine.generate(
            text.tokens[: text.prompt],
            max_new_tokens=text.limit,
            sampling=Sampling(),
            generator=torch.Generator(self.target.device),
            stop=self.stop,
        )
        return written


def measure_costs(
    bench: Bench, texts: Sequence[Text], nodes: int, builders: Mapping[str, TreeBuilder]
) -> Costs:
    """Medians over texts, all shapes taking turns on every one, after a warm-up.

    Args:
        bench: what is measured.
        texts: with an answer of the target; engines continue from the middle of it.
        nodes: the largest tree.
        builders: builders other than templates, to be priced too.

    Raises:
        FalconLabError: no text is long enough.
    """
    parts = [middle(text) for text in texts if text.answer > 2 * SHORTEST]
    if len(parts) < 2:
        raise FalconLabError(
            f"two texts of more than {2 * SHORTEST} tokens are needed to measure on; ask for more "
            "of them, or for longer ones (evaluation.max_new_tokens)"
        )
    block = bench.drafter.block
    templates = {
        name: TemplateTree(checked(paths), block, "deterministic")
        for name, paths in shapes(block, nodes, bench.target.vocab_size).items()
    }
    plain = PlainEngine(bench.target, decoding=bench.base.decoding)
    steps: list[Generation] = []
    samples: dict[str, list[Sample]] = {}
    every: dict[str, TreeBuilder] = {**templates, **builders}
    if bench.base.decoding.compile != "none":
        for builder in every.values():
            prepare(bench.engine(builder))
    for turn, part in enumerate([parts[0], *parts]):
        for name in rotated(list(every), turn):
            sample = sample_of(bench, part, every[name])
            if turn and sample is not None:  # the first turn warms up
                samples.setdefault(name, []).append(sample)
        if turn:
            steps.append(bench.write(plain, part))
    medians = {name: _medians(taken) for name, taken in samples.items()}
    asking = measure_asking(bench, parts[0])
    return fitted(medians, steps, asking, set(builders))


def middle(text: Text) -> Text:
    """Return the text up to the middle of its answer, as the prompt of a measurement."""
    start = text.prompt + text.answer // 2
    limit = min(TOKENS, text.tokens.shape[0] - start)
    stop = start + limit
    taps = None if text.taps is None else text.taps[: stop - 1]
    return Text(text.tokens[:stop], text.features[: stop - 1], start, limit, taps)


def sample_of(bench: Bench, text: Text, builder: TreeBuilder) -> Sample | None:
    """Measure one generation; None when it had no round."""
    written = bench.write(bench.engine(builder), text)
    rounds, seconds = written.rounds, written.seconds
    if not rounds:
        return None
    count = len(rounds)
    extra = [sum(f - 1 for f in blocks[1:]) for blocks in blocks_of(bench, text, builder, rounds)]
    return Sample(
        nodes=sum(r.nodes for r in rounds) / count,
        later=sum(max(r.passes - 1, 0) for r in rounds) / count,
        extra=sum(extra) / max(len(extra), 1),
        verify=seconds.verify / count,
        draft=(seconds.draft + seconds.overhead) / count,
        fixed=(seconds.accept + seconds.commit) / count,
        prefill=seconds.prefill,
    )


def blocks_of(
    bench: Bench, text: Text, builder: TreeBuilder, rounds: Sequence[Round]
) -> list[tuple[int, ...]]:
    """Return F of every pass of every round: a template fixes them, others are replayed."""
    if isinstance(builder, TemplateTree):
        passes = build_layout(builder.paths, builder.block).passes
        every = tuple(plan.stands.shape[0] for plan in passes)
        return [every[: done.passes] for done in rounds]
    fixed = Fixed(FixedConfig(), bench.context)
    return [done.blocks for done in replay(text, bench.drafter, builder, fixed)]


def _medians(samples: Sequence[Sample]) -> Sample:
    names = Sample.__dataclass_fields__
    return Sample(**{name: median(getattr(s, name) for s in samples) for name in names})


def measure_asking(bench: Bench, text: Text) -> float:
    """Measure the median seconds that the ``confidence`` controller needs for a pass."""
    with torch.inference_mode():
        bench.drafter.reset(text.tokens[0])
        bench.drafter.observe(text.observed(bench.drafter, 0, len(text.tokens) - 1))
        output = bench.drafter.draft(Frontier.root(text.tokens.device))
        if not output.logits.shape[1]:
            return 0.0
        controller = Confidence(ConfidenceConfig(), bench.context)
        taken = []
        for _ in range(LOOKS):
            with Stopwatch() as watch:
                controller.keep_going(1, output)
            taken.append(watch.wall)
    return median(taken)


def fitted(
    medians: Mapping[str, Sample], steps: Sequence[Generation], asking: float, builders: set[str]
) -> Costs:
    """Fit costs to the medians of all shapes: passes and blocks by least squares.

    Args:
        medians: shape or builder -> what was measured.
        steps: plain decoding of the same texts.
        asking: of the controller.
        builders: those of ``medians`` that are no templates.
    """
    of_templates = [s for name, s in medians.items() if name not in builders]
    table = np.array([[1.0, s.later, s.extra] for s in of_templates])
    drafts = [s.draft for s in of_templates]
    first, later, block = np.linalg.lstsq(table, drafts, rcond=None)[0]
    plain = median(s.seconds.verify / len(s.rounds) for s in steps if s.rounds)
    costs = Costs(
        verify=curve([(0.0, plain), *((s.nodes, s.verify) for s in of_templates)]),
        first=float(first),
        later=max(float(later), 0.0),
        block=max(float(block), 0.0),
        asking=asking,
        fixed=median(s.fixed for s in of_templates),
        step=median(s.seconds.total / len(s.rounds) for s in steps if s.rounds),
        prefill=median(s.prefill for s in medians.values()),
        plain_prefill=median(s.seconds.prefill for s in steps),
    )
    return replace(costs, builders={n: surcharge(medians[n], costs) for n in sorted(builders)})


def surcharge(sample: Sample, costs: Costs) -> float:
    """What a pass of a builder costs beyond a template's."""
    like_a_template = costs.first + costs.later * sample.later + costs.block * sample.extra
    return (sample.draft - like_a_template) / (1 + sample.later)


def curve(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort points, and merge those less than half a node apart into their mean."""
    ordered = sorted(points)
    groups = [[ordered[0]]]
    for before, point in pairwise(ordered):
        if point[0] - before[0] < 0.5:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [(fmean(x for x, _ in g), fmean(y for _, y in g)) for g in groups]
