"""Which layers are a group."""

from __future__ import annotations

from collections.abc import Sequence

from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import LayerPlan, SideBySide
from falcon_lab_easyspec import SIZE, EasySpecConfig

Groups = tuple[tuple[int, ...], ...]


def plan_of(config: EasySpecConfig, layers: int, beside: SideBySide | None = None) -> LayerPlan:
    """Return the plan that options stand for in a model.

    Args:
        config: the options.
        layers: of the model.
        beside: computes the attentions of a group; None: this device.

    Raises:
        ConfigError: the model has not such layers, or they are no groups.
    """
    if config.groups is None:
        groups = groups_of(config.size or SIZE, layers)
    else:
        groups = tuple(map(tuple, config.groups))
    plan = LayerPlan(groups=groups, beside=beside)
    try:
        plan.check(layers)
    except FalconLabError as error:
        raise ConfigError("groups", str(error)) from error
    return plan


def groups_of(size: int, layers: int) -> Groups:
    """Return groups of so many layers between the first and the last; the rest are a smaller one.

    A group of one layer is none.
    """
    between = range(1, layers - 1)
    parts = [tuple(between[start : start + size]) for start in range(0, len(between), size)]
    return tuple(part for part in parts if len(part) > 1)


def stages(groups: Sequence[Sequence[int]], layers: int) -> list[int]:
    """Return how many layers run side by side, from the bottom to the top: 1 outside of groups."""
    inner = sum(map(len, groups))
    return [*map(len, groups), *[1] * (layers - inner)]
