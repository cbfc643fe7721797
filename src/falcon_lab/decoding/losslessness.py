"""Is speculative output the target's own? Greedy equality, and the distance of sampled output.

Shapes: P prompt tokens, S samples, C columns (statistics of one sample), K outcomes of a column,
R bootstrap resamples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from falcon_lab.bars import BAR_DELAY, Bar
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.rounding import is_tie, read_again
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.sampling import Sampling

Engine = PlainEngine | SpeculativeEngine


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a greedy text left the plain one.

    Attributes:
        prompt: index of the prompt.
        position: first new token that differs, 0-based.
        plain: plain decoding's token, None where its text had ended.
        speculative: the other.
        margin: the target's best logit minus its second best there. Near 0, the order in which a
            kernel adds decides; anything else is a fault.
        gap: how far the logits of the two tokens are apart; None where one text had ended.
    """

    prompt: int
    position: int
    plain: int | None
    speculative: int | None
    margin: float
    gap: float | None


@dataclass(frozen=True, slots=True)
class GreedyEquality:
    """Greedy texts, token for token.

    Attributes:
        prompts: how many were compared.
        tokens: tokens of the plain texts.
        divergences: the first difference of every text that differs.
        noise: how far rounding moves such a gap in the texts that differ (``Reading``); None where
            none differs, and in types where it is no excuse.
    """

    prompts: int
    tokens: int
    divergences: tuple[Divergence, ...]
    noise: float | None = None

    @property
    def faults(self) -> tuple[Divergence, ...]:
        """Return the differences that no rounding explains."""
        return tuple(each for each in self.divergences if not is_tie(each.gap, self.noise))

    @property
    def passed(self) -> bool:
        """Whether every text is the same, but for ties that rounding decides."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """Return the verdict as one sentence."""
        if not self.divergences:
            return f"greedy output is identical: {self.tokens} tokens over {self.prompts} prompts"
        moved = f"passes of other widths move such gaps by up to {self.noise or 0:.2g}"
        if self.passed:
            widest = max(each.gap or 0.0 for each in self.divergences)
            return (
                f"greedy output parts at ties alone, on {len(self.divergences)} of {self.prompts} "
                f"prompts: the two tokens' logits are at most {widest:.2g} apart there, and {moved}"
            )
        first = self.faults[0]
        widest = max(divergence.margin for divergence in self.faults)
        return (
            f"greedy output differs on {len(self.faults)} of {self.prompts} prompts, first at "
            f"new token {first.position} of prompt {first.prompt} ({first.plain} became "
            f"{first.speculative}); largest logit margin at a first difference: {widest:.2g}"
        ) + (f"; {moved}" if self.noise is not None else "")


def greedy_equality(
    plain: PlainEngine,
    speculative: Engine,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    stop: StopCondition,
) -> GreedyEquality:
    """Decode every prompt (``[P]`` long) both ways and compare.

    Every text that differs is read again, to see whether it parts at a tie.
    """
    tokens = 0
    divergences = []
    noise: float | None = None
    for index, prompt in enumerate(Bar(prompts, desc="greedy texts", delay=BAR_DELAY, leave=False)):
        generator = torch.Generator(prompt.device).manual_seed(0)
        ours, theirs = (
            engine.generate(
                prompt,
                max_new_tokens=max_new_tokens,
                sampling=Sampling(),
                generator=generator,
                stop=stop,
            ).tokens
            for engine in (speculative, plain)
        )
        tokens += len(theirs)
        for position, (right, found) in enumerate(zip_longest(theirs, ours)):
            if right != found:
                read = read_again(plain.target, prompt, theirs)
                logits = read.logits[position]
                best, second = logits.topk(2).values.tolist()
                gap = None
                if right is not None and found is not None:
                    gap = float((logits[right] - logits[found]).abs())
                divergences.append(Divergence(index, position, right, found, best - second, gap))
                if read.noise is not None:
                    noise = max(noise or 0.0, read.noise)
                break
    return GreedyEquality(len(prompts), tokens, tuple(divergences), noise)


@dataclass(frozen=True, slots=True)
class SampledDistance:
    """How far sampled speculative output is from the target's own.

    Attributes:
        samples: S, texts of each prompt in every set.
        distance: total variation between the speculative sample and a plain one, mean over
            prompts and columns. It is never 0: two samples of one distribution differ too.
        floor: the same between two plain samples.
        interval: bootstrap interval of ``distance - floor``.
        confidence: of the interval.
    """

    samples: int
    distance: float
    floor: float
    interval: tuple[float, float]
    confidence: float

    @property
    def passed(self) -> bool:
        """Whether the distance can be noise alone: the interval reaches down to 0."""
        return self.interval[0] <= 0

    @property
    def verdict(self) -> str:
        """Return the verdict as one sentence."""
        low, high = self.interval
        where = "within" if self.passed else "OUTSIDE"
        return (
            f"sampled output is {where} the noise: total variation "
            f"{self.distance:.4f}, floor {self.floor:.4f}, excess between {low:.4f} and "
            f"{high:.4f} ({self.confidence:.0%} bootstrap, {self.samples} samples a prompt)"
        )


def sampled_distance(
    plain: PlainEngine,
    speculative: Engine,
    prompts: Sequence[Tensor],
    *,
    sampling: Sampling,
    stop: StopCondition,
    samples: int = 500,
    tokens: int = 4,
    joint: bool = False,
    seed: int = 0,
    confidence: float = 0.99,
    resamples: int = 500,
    side_by_side: int = 1,
) -> SampledDistance:
    """Sample continuations both ways and compare their distributions.

    Args:
        plain: gives two independent sets, whose distance is the noise floor.
        speculative: gives the third.
        prompts: ``[P]`` long each.
        sampling: T > 0.
        stop: what ends a text; what is missing of an ended text is an outcome like any other.
        samples: S, of each set and prompt.
        tokens: new tokens that count.
        joint: compare all of them at once, which sees more on a vocabulary of a few tokens; else
            each position alone. The first token comes from the prompt alone, whatever the
            drafter does, and is left out then.
        seed: of everything.
        confidence: of the interval.
        resamples: R.
        side_by_side: plain samples that share the target's passes, and the prompt in them. The
            speculative ones are drawn one by one, as users decode.
    """
    distances, floors, spreads = [], [], []
    generator = torch.Generator().manual_seed(seed)
    beside = PlainEngine(plain.target, decoding=plain.decoding, shares_beginnings=True)
    count = 3 * samples * len(prompts)
    bar = Bar(total=count, desc="sampled texts", delay=BAR_DELAY, leave=False)
    for index, prompt in enumerate(prompts):
        sets = []
        for part, engine in enumerate((speculative, beside, beside)):
            draws = torch.Generator(prompt.device).manual_seed(seed + 3 * index + part + 1)
            settings = {"max_new_tokens": tokens, "sampling": sampling, "stop": stop}
            size = 1 if engine is speculative else side_by_side
            texts = _continuations(engine, prompt, samples, size, draws, settings)
            sets.append(_collected(texts, samples, tokens, bar))
        columns = _columns(torch.stack(sets), joint)
        everything = torch.arange(samples)[None]
        distance, floor = _distances(columns, [everything] * 3)
        distances.append(distance)
        floors.append(floor)
        resampled = [
            torch.randint(samples, (resamples, samples), generator=generator) for _ in range(3)
        ]
        again = torch.sub(*_distances(columns, resampled))
        # Sampling from a sample adds noise to all three sets and draws the excess to 0: the
        # resamples tell its spread, not its place.
        spreads.append(again - again.mean())
    found, floor = torch.stack(distances).mean(), torch.stack(floors).mean()
    excess = found - floor + torch.stack(spreads).mean(0)
    bar.close()
    tail = (1 - confidence) / 2
    low, high = excess.quantile(excess.new_tensor([tail, 1 - tail])).tolist()
    return SampledDistance(samples, float(found), float(floor), (low, high), confidence)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Return half of the sum of absolute differences, ``[...]``, of ``[..., K]`` distributions."""
    return (p - q).abs().sum(-1) / 2


def _continuations(
    engine: Engine,
    prompt: Tensor,
    samples: int,
    side_by_side: int,
    generator: torch.Generator,
    settings: Mapping[str, Any],
) -> Iterator[Generation]:
    """Sample S continuations."""
    if side_by_side == 1:
        return (engine.generate(prompt, generator=generator, **settings) for _ in range(samples))
    draws = [generator] * samples
    together = engine.stream(
        [prompt] * samples, batch_size=side_by_side, generators=draws, **settings
    )
    return (text for _, text in together)


def _collected(found: Iterator[Generation], samples: int, tokens: int, bar: Bar) -> Tensor:
    """Return continuations as ``[S, tokens]`` long; -1 after the end of a text."""
    texts = torch.full((samples, tokens), -1)
    for row, text in zip(texts, found, strict=True):
        row[: len(text.tokens)] = torch.tensor(text.tokens)
        bar.update()
    return texts


def _columns(sets: Tensor, joint: bool) -> list[Tensor]:
    """Number the outcomes of ``[3, S, tokens]`` in C columns, each ``[3, S]`` with 0..K-1."""
    if joint:
        flat = sets.flatten(0, 1)
        return [flat.unique(dim=0, return_inverse=True)[1].view(sets.shape[:2])]
    positions = range(min(1, sets.shape[2] - 1), sets.shape[2])
    return [sets[..., position].unique(return_inverse=True)[1] for position in positions]


def _distances(columns: list[Tensor], resampled: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Distance and floor ``[R]`` of the samples that ``[R, S]`` indices choose of each set."""
    distance, floor = torch.zeros(()), torch.zeros(())
    for column in columns:
        outcomes = int(column.max()) + 1
        ours, first, second = (
            _frequencies(column[part][chosen], outcomes) for part, chosen in enumerate(resampled)
        )
        both = total_variation(ours, first) + total_variation(ours, second)
        distance = distance + both / 2 / len(columns)
        floor = floor + total_variation(first, second) / len(columns)
    return distance, floor


def _frequencies(outcomes: Tensor, count: int) -> Tensor:
    """``[R, S]`` outcome numbers -> ``[R, K]`` shares."""
    shares = torch.zeros(outcomes.shape[0], count)
    return shares.scatter_add_(1, outcomes, torch.full(outcomes.shape, 1 / outcomes.shape[1]))
