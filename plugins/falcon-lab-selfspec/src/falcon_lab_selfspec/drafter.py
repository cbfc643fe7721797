"""Draft & Verify (arXiv 2309.08168) and LayerSkip's early exit (arXiv 2404.16710)."""

from __future__ import annotations

from torch import Tensor

from falcon_lab.drafters.self_drafting import SelfDrafter
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import BuildContext, LayerPlan
from falcon_lab_selfspec import SKIPS, SelfSpecConfig


class SelfSpecDrafter(SelfDrafter):
    """Draft with the target itself, some of whose layers or parts of layers are skipped.

    Where it drafts with the first layers alone, verification goes on behind them.

    Args:
        config: what is skipped.
        context: gives the target.

    Raises:
        ConfigError: the target has not such layers, or nothing is left of them.
    """

    def __init__(self, config: SelfSpecConfig, context: BuildContext) -> None:
        super().__init__(context.host)
        self._plan = plan_of(config, context.host.config.num_hidden_layers)
        self.lower_layers = self._plan.last or 0

    @property
    def plan(self) -> LayerPlan:
        """The part of the target that drafts."""
        return self._plan

    def logits(self, states: Tensor) -> Tensor:
        """Turn ``[F, H]`` where the plan ends into ``[F, V]``: an exit goes through the norm."""
        return super().logits(self.host.norm(states) if self.lower_layers else states)


def plan_of(config: SelfSpecConfig, count: int) -> LayerPlan:
    """Return the plan that options stand for in a target with ``count`` layers.

    Raises:
        ConfigError: the target has not such layers, or nothing is left of them.
    """
    if config.layers is not None:
        if config.layers > count:
            raise ConfigError("layers", f"is {config.layers}; the target has {count}")
        return LayerPlan() if config.layers == count else LayerPlan(last=config.layers)
    if config.skip_attention is None and config.skip_mlp is None:
        skipped = default_skipped(count)
        return LayerPlan(skip_attention=skipped, skip_mlp=skipped)
    for key in SKIPS:
        if wrong := [layer for layer in getattr(config, key) or () if layer >= count]:
            raise ConfigError(key, f"has layer {wrong[0]}; the target's are 0 to {count - 1}")
    attention, mlp = (frozenset(getattr(config, key) or ()) for key in SKIPS)
    if len(attention & mlp) == count:
        key = SKIPS[0]
        raise ConfigError(key, f"and {SKIPS[1]} skip all {count} layers; leave some of them")
    return LayerPlan(skip_attention=attention, skip_mlp=mlp)


def default_skipped(count: int) -> frozenset[int]:
    """Return every second layer of the middle half of ``count``: 8, 10, … 22 of 30."""
    quarter = count // 4
    return frozenset(range(quarter + 1, count - quarter, 2))
