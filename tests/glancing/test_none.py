from typing import Any

import torch

from falcon_lab.glancing import NoGlancing
from falcon_lab.interfaces import BuildContext, GlanceRows


def test_nothing_is_ever_shown() -> None:
    host: Any = None
    schedule = NoGlancing(None, BuildContext(host))
    yes = torch.ones(2, 6, dtype=torch.bool)
    slot = torch.arange(6).expand(2, 6) % 2
    group = torch.arange(6).expand(2, 6).div(2, rounding_mode="floor")
    assert schedule.ratio(0.0) == schedule.ratio(1.0) == 0.0
    assert not schedule.reveal(GlanceRows(yes, yes, slot, group, 2), 1.0, torch.Generator()).any()
