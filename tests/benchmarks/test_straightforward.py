"""The loop that ours is measured against gives the same curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distilling import QUIET, Batches, Data, Notes, batch, distillation, weights
from falcon_bench.straightforward import Manner, StraightforwardLoop, one_document_a_row
from falcon_lab.distill.module import Distillation
from falcon_lab.glancing import NoGlancing
from falcon_lab.interfaces import BuildContext
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import FalconObjectiveConfig
from falcon_lab.training import train

STEPS = [3, 4, 5, 6, 7, 8]


def _ours(module: Distillation, folder: Path) -> list[float]:
    notes = Notes()
    trainer = {**QUIET, "max_steps": len(STEPS), "gradient_clip_val": 0.5}
    train(module, Data(STEPS), trainer, folder, notes, 0)
    return notes.series("train/loss")


def _module(**options: Any) -> Distillation:
    objective = FalconObjective(FalconObjectiveConfig(soft=1.0, hard=0.1), BuildContext(None))  # type: ignore[arg-type]
    return distillation(objective=objective, dropout=0.0, **options)


@pytest.mark.parametrize(
    "manner",
    [Manner(padded=True, teach_each=True), Manner(teach_each=True), Manner()],
)
@pytest.mark.parametrize("options", [{"repeats": 2}, {"block": 3}])
def test_the_loss_curve_is_ours(tmp_path: Path, manner: Manner, options: dict[str, Any]) -> None:
    module = _module(**options)
    loop = StraightforwardLoop(module, manner)
    assert _ours(module, tmp_path) == pytest.approx(
        [loop.step(each) for each in Batches(STEPS)], rel=1e-4
    )
    for name, tensor in loop.drafter.state_dict().items():
        assert torch.allclose(tensor, weights(module)[name], atol=1e-3), name


def test_documents_alone_give_our_curve_where_nothing_random_depends_on_rows(
    tmp_path: Path,
) -> None:
    module = _module(noise=0.0, glancing=NoGlancing(None, BuildContext(None)))  # type: ignore[arg-type]
    loop = StraightforwardLoop(module, Manner(alone=True, teach_each=True))
    module.drafter.aligned = loop.drafter.aligned = False
    assert _ours(module, tmp_path) == pytest.approx(
        [loop.step(each) for each in Batches(STEPS)], rel=1e-4
    )


def test_each_document_gets_a_row_of_its_own() -> None:
    packed = batch(3)._replace(
        documents=torch.tensor([[0] * 8 + [1] * 16, [0] * 8 + [1] * 13 + [-1] * 3])
    )
    alone = one_document_a_row(packed)
    assert alone.tokens.shape == (4, 16)
    assert (alone.documents >= 0).sum(1).tolist() == [8, 16, 8, 13]
    assert torch.equal(alone.tokens[1], packed.tokens[0, 8:])
    assert torch.equal(alone.tokens[3, :13], packed.tokens[1, 8:21])
    assert not alone.loss_mask[alone.documents < 0].any()
