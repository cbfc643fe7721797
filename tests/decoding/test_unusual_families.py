"""Sequences side by side are plain decoding's, on families whose layers are made of other parts."""

from __future__ import annotations

import pytest
import torch

from fakes.batches import same_texts, together
from fakes.decoding import plain, speculative
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.trees.templates import named
from unusual_models import CONFIGURATIONS, unusual_target

PROMPTS = ([5, 9, 3], [7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
NEW = 12


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_a_falcon_head_drafts_for_several_sequences_at_once(family: str) -> None:
    target = unusual_target(family)
    torch.manual_seed(0)
    drafter = FalconDrafter(FalconConfig(block=2), BuildContext(target)).eval()
    found = together(speculative(target, drafter, named("auto", 2)), 3, PROMPTS, NEW)
    same_texts(found, [plain(target, prompt, NEW) for prompt in PROMPTS])
