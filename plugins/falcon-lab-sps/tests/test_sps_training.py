"""A fresh draft model is distilled by the module that trains every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafter import SpsDrafter
from lightning.pytorch import LightningDataModule, seed_everything
from sps_cases import VOCAB, chain, engine, generate, plain, target, tell, uncached
from torch.utils.data import DataLoader

from falcon_lab.builtins import CsgdConfig, FalconObjectiveConfig
from falcon_lab.components import Component, Components
from falcon_lab.data.batch import Batch
from falcon_lab.distillation.module import Distillation
from falcon_lab.distillation.training import train
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.glancing.csgd import Csgd
from falcon_lab.glancing.none import NoGlancing
from falcon_lab.objectives.falcon import FalconObjective
from falcon_lab.protocols import BuildContext, DrafterInputs, Reveal, is_trainable
from falcon_lab.schema import DistillationConfig, OptimizerConfig

LENGTH = 24
TRAINER = {"accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 5}


def batch(index: int) -> Batch:
    """Two documents a sequence, of letters in random order."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(1, VOCAB, (8, LENGTH), generator=generator)
    documents = (torch.arange(LENGTH) >= 9).long().expand(8, -1)
    positions = torch.cat((torch.arange(9), torch.arange(LENGTH - 9))).expand(8, -1)
    mask = torch.ones(8, LENGTH, dtype=torch.bool)
    return Batch(tokens, mask, documents, positions, torch.tensor(index))


def loader(numbers: range) -> Any:
    return DataLoader([batch(number) for number in numbers], batch_size=None)  # type: ignore[arg-type]


class Data(LightningDataModule):
    """Batches by number."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def train_dataloader(self) -> Any:
        return loader(range(self._steps))

    def val_dataloader(self) -> Any:
        return loader(range(1000, 1001))


def fresh(**options: Any) -> SpsDrafter:
    seed_everything(0, verbose=False)
    return SpsDrafter(SpsConfig(**options), BuildContext(target("llama")))


def module(draft: SpsDrafter, steps: int, **settings: Any) -> Distillation:
    objective = FalconObjectiveConfig(feature=0.0, soft=1.0, hard=0.1)
    context = BuildContext(target("llama"), 1)
    return Distillation(
        target("llama"),
        draft,
        FalconObjective(objective, context),
        settings.pop("schedule", NoGlancing(None, context)),
        DistillationConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2), **settings),
        seed=0,
        max_steps=steps,
    )


def accepted(draft: SpsDrafter) -> int:
    """Draft tokens that are accepted over texts which are the target's own."""
    total = 0
    for prompt in ([5, 3, 2], [7, 7, 1], [2, 9, 4]):
        out = generate(engine("llama", draft.eval(), chain(3)), prompt, 40)
        assert out.tokens == plain("llama", prompt, 40)
        total += sum(round_.accepted for round_ in out.rounds)
    return total


def test_distilling_makes_a_better_drafter_that_can_be_saved(tmp_path: Path) -> None:
    draft, steps = fresh(layers=1), 60
    before = accepted(draft)
    trained = module(draft, steps)
    trainer = train(trained, Data(steps), {**TRAINER, "max_steps": steps}, tmp_path)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {"val/loss", "val/position_1/accuracy", "val/expected_accept_length"} <= values.keys()
    assert "val/loss/feature" not in values
    after = accepted(draft)
    assert after > 2 * max(before, 5)

    node = {"name": "sps", "layers": 1}
    kinds = Component("drafter", "sps", SpsDrafter, SpsConfig, "falcon-lab-sps", "0")
    save_drafter(
        tmp_path / "saved", draft, node=node, provenance={}, target=target("llama"), card=""
    )
    again = load_drafter(tmp_path / "saved", target("llama"), Components([kinds]))
    assert accepted(again) == after


def inputs(tokens: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor) -> DrafterInputs:
    features = torch.zeros(*tokens.shape, 32)
    return DrafterInputs(tokens, features, documents, positions, torch.Generator())


@torch.no_grad()
def test_training_sees_what_drafting_sees() -> None:
    draft, text = fresh(layers=1).eval(), [4, 2, 9, 1, 7, 3]
    one = torch.tensor([text])
    rows = inputs(one[:, 1:], torch.zeros_like(one)[:, 1:], torch.arange(5)[None])
    found = draft(rows).logits[0]
    draft.reset(torch.tensor(text[0]))
    for place in range(1, len(text)):
        tell(draft, text[place : place + 1])
        assert torch.allclose(found[place - 1], uncached(draft, text[: place + 1]), atol=1e-5)


@torch.no_grad()
def test_a_document_does_not_see_the_one_before() -> None:
    draft, packed = fresh(layers=1).eval(), batch(3)
    rows = inputs(packed.tokens[:, 1:], packed.documents[:, :-1], packed.positions[:, :-1])
    whole = draft(rows).logits[:, 9:]
    alone = inputs(rows.tokens[:, 9:], rows.documents[:, 9:], rows.positions[:, 9:])
    assert torch.allclose(whole, draft(alone).logits, atol=1e-5)


def test_repeats_and_a_schedule_for_blocks_do_no_harm() -> None:
    schedule = Csgd(CsgdConfig(), BuildContext(target("llama"), 1))
    lesson = module(fresh(layers=1), 1, schedule=schedule, repeats=2).lesson(batch(0))
    loss, tally = lesson.learn(schedule.ratio(0.0), accuracy=True)
    loss.backward()
    assert {"train/loss", "train/loss/soft", "train/position_1/accuracy"} <= tally.reduced().keys()


def test_it_has_nothing_to_glance_at() -> None:
    draft, one = fresh(), torch.ones(1, 4, dtype=torch.long)
    assert is_trainable(draft)
    shown = Reveal(one.bool(), one, torch.zeros(1, 4, 32))
    with pytest.raises(FalconLabError, match=r"glancing\.name=none"):
        draft(inputs(one, one, one), shown)


def test_an_objective_that_wants_features_is_refused_with_what_to_do() -> None:
    trained = module(fresh(layers=1), 1)
    trained.objective = FalconObjective(FalconObjectiveConfig(), BuildContext(target("llama"), 1))
    with pytest.raises(FalconLabError, match=r"objective\.feature=0"):
        trained.lesson(batch(0)).learn(0.0)
