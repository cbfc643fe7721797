"""EasySpec (arXiv 2502.02493): drafting with the attentions of several layers side by side.

Shapes: n tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, Self

from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafter import DraftModel
from falcon_lab_sps.small_model import small_model

from falcon_lab.drafters.self_drafting import SelfDrafter
from falcon_lab.interfaces import BuildContext, Drafter, LayerPlan, SideBySide
from falcon_lab.model.passes import EagerPass, PassMaker
from falcon_lab_easyspec import EasySpecConfig
from falcon_lab_easyspec.calibration import CalibratedDrafting
from falcon_lab_easyspec.groups import plan_of


def build(config: EasySpecConfig, context: BuildContext) -> Drafter:
    """Build the drafter on the target itself, or on a draft model.

    Raises:
        ConfigError: the model has not such layers, or they are no groups.
        FalconLabError: the draft model cannot be loaded, or its vocabulary is another one.
    """
    made = SideBySideDrafter if config.model is None else SideBySideModel
    return made(config, context)


class SideBySideDrafter(SelfDrafter):
    """The target as its own draft model.

    Verification writes the keys and values of all layers, one layer after the other, so that the
    committed text is calibrated in every round at no cost. What a round's own passes write is fuzzy
    from the newest token on.

    Args:
        config: which layers are a group.
        context: gives the target.
        beside: computes the attentions of a group; None: this device.

    Raises:
        ConfigError: the target has not such layers, or they are no groups.
    """

    def __init__(
        self, config: EasySpecConfig, context: BuildContext, beside: SideBySide | None = None
    ) -> None:
        super().__init__(context.host)
        self._plan = plan_of(config, context.host.config.num_hidden_layers, beside)

    @property
    def plan(self) -> LayerPlan:
        """All layers, in groups."""
        return self._plan


class SideBySideModel(DraftModel):
    """A draft model whose draft tokens go through groups of layers; it is not trained.

    Args:
        config: which model, which layers are a group, and when the cache is calibrated.
        context: gives the target.
        beside: computes the attentions of a group; None: this device.

    Raises:
        ConfigError: the model has not such layers, or they are no groups.
        FalconLabError: it cannot be loaded, or its vocabulary is another one.
    """

    _first = 0

    def __init__(
        self, config: EasySpecConfig, context: BuildContext, beside: SideBySide | None = None
    ) -> None:
        self.host, self.draft_vocabulary = context.host, None
        wanted = SpsConfig(model=config.model, revision=config.revision)
        self.model = small_model(wanted, context.host).requires_grad_(False)
        self._calibration = config.calibration or "every_round"
        self.plan = plan_of(config, self.model.config.num_hidden_layers, beside)
        self.draft_through(EagerPass)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy for another sequence, which shares the model; its passes are eager."""
        other = copy.copy(self)
        other.draft_through(EagerPass)
        return other

    def draft_through(self, make: PassMaker) -> None:
        """Make a way for draft tokens beside that of committed ones."""
        self._fuzzy = self._made_way(make, "drafter-groups", self.plan)
        super().draft_through(make)

    def _text(self) -> CalibratedDrafting:
        return CalibratedDrafting(
            self.model, self._way, self._fuzzy, self._first, self._calibration
        )

    def prepare(self, longest: int) -> None:
        """Compile the passes of rounds of up to so many new tokens now, if they are to be."""
        super().prepare(longest)
        self._fuzzy.run.prepare(longest)
