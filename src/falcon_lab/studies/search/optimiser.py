"""Proposes points of a space by Bayesian optimisation, with optuna.

What is proposed follows from the seed and from the scores before alone, so that a search which goes
on from a file proposes what an uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.studies.search.space import Choices, Dimension, Interval, Point, Space, Subset, draw

SAMPLERS = ("gp", "tpe")
"""A Gaussian process (the one of Draft & Verify), and a tree of Parzen estimators."""

INSTALL = "falcon-lab search needs optuna, which is not installed; pip install optuna"

DRAWN = 10
"""Points that are drawn at random before anything is learnt from them."""

SEEDS = 1_000_003
"""What the seeds of two searches are apart, more than any has attempts."""


def check_installed() -> None:
    """See that optuna is there.

    Raises:
        FalconLabError: it is not.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise FalconLabError(INSTALL) from error


class Optimiser:
    """Proposes the point to try next, and learns from what it was worth.

    Args:
        space: what is searched.
        sampler: one of ``SAMPLERS``.
        seed: of all that is drawn.
        exact: whether the same point has the same score every time.
        first: a point to begin with, if there is one.

    Raises:
        FalconLabError: optuna is not installed.
    """

    def __init__(
        self, space: Space, *, sampler: str, seed: int, exact: bool, first: Point | None = None
    ) -> None:
        check_installed()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, self._sampler, self._seed, self._exact = space, sampler, seed, exact
        self._first = first
        self._study = optuna.create_study(direction="maximize")
        self._distributions = dict(_distributions(space))
        self._told = 0
        self._pending: Any = None

    def ask(self) -> Point:
        """Propose a point."""
        random = Random(self._seed * SEEDS + self._told)
        if self._told == 0 and self._first is not None:
            return self._first
        if self._told < DRAWN:
            return draw(self._space, random)
        self._study.sampler = self._made_sampler(random.getrandbits(31))
        self._pending = self._study.ask(self._distributions)
        return _decoded(self._space, self._pending.params)

    def tell(self, point: Point, score: float) -> None:
        """Learn what a point was worth, whoever proposed it; the higher the better."""
        import optuna

        params = _encoded(self._space, point)
        pending, self._pending = self._pending, None
        if pending is not None and pending.params == params:
            self._study.tell(pending, score)
        else:
            if pending is not None:
                self._study.tell(pending, state=optuna.trial.TrialState.FAIL)
            distributions = self._distributions
            trial = optuna.trial.create_trial(
                params=params, distributions=distributions, value=score
            )
            self._study.add_trial(trial)
        self._told += 1

    def _made_sampler(self, seed: int) -> Any:
        import warnings

        from optuna import samplers
        from optuna.exceptions import ExperimentalWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            if self._sampler == "tpe":
                return samplers.TPESampler(seed=seed, n_startup_trials=DRAWN, multivariate=True)
            return samplers.GPSampler(
                seed=seed, n_startup_trials=DRAWN, deterministic_objective=self._exact
            )


def _distributions(space: Space) -> Iterator[tuple[str, Any]]:
    """Yield what optuna draws; a subset is a number between 0 and 1 for each that may be in it."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    for key, dimension in space.items():
        if isinstance(dimension, Subset):
            for number in dimension.numbers:
                yield f"{key}.{number}", IntDistribution(0, 1)
        elif isinstance(dimension, Choices):
            yield key, CategoricalDistribution([*range(len(dimension.values))])
        elif dimension.whole:
            yield key, IntDistribution(int(dimension.low), int(dimension.high))
        else:
            yield key, FloatDistribution(dimension.low, dimension.high)


def _encoded(space: Space, point: Point) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for key, dimension in space.items():
        value = point[key]
        if isinstance(dimension, Subset):
            params |= {f"{key}.{number}": int(number in value) for number in dimension.numbers}
        elif isinstance(dimension, Choices):
            params[key] = dimension.values.index(value)
        else:
            params[key] = value
    return params


def _decoded(space: Space, params: dict[str, Any]) -> Point:
    def value(key: str, dimension: Dimension) -> Any:
        if isinstance(dimension, Subset):
            return [number for number in dimension.numbers if params[f"{key}.{number}"]]
        if isinstance(dimension, Choices):
            return dimension.values[params[key]]
        assert isinstance(dimension, Interval)
        return params[key]

    return {key: value(key, dimension) for key, dimension in space.items()}
