import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distilling import QUIET, Data, Notes, batch, distillation, weights
from fakes.drafters import TrainedAlone
from falcon_lab.data.packing import Batch
from falcon_lab.distill.module import Distillation
from falcon_lab.errors import FalconLabError
from falcon_lab.glancing import Csgd, NoGlancing
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    GlanceRows,
    GlancingSchedule,
    Prediction,
    Reveal,
)
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import CsgdConfig, FalconObjectiveConfig
from falcon_lab.training import train
from tiny_models import tiny_target

CONTEXT = BuildContext(None, block=2)  # type: ignore[arg-type]


def _fit(module: Distillation, folder: Path, **trainer: Any) -> Notes:
    notes = Notes()
    data = Data(list(range(20)), trainer.pop("validation", None))
    train(module, data, {**QUIET, **trainer}, folder, notes, checkpoint_every=3)
    return notes


class Perfect(nn.Module, TrainedAlone):
    """Knows the target's features k ahead; one useless weight, so that it can be trained."""

    def __init__(self, block: int, *, as_logits: Any = None) -> None:
        super().__init__()
        self.block, self.as_logits = block, as_logits
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        column = torch.arange(inputs.tokens.shape[1]).expand_as(inputs.tokens)
        ahead = inputs.features.roll(-self.block, 1) * self.scale
        logits = None if self.as_logits is None else self.as_logits(ahead)
        slot = inputs.positions % self.block
        group = inputs.documents * 1000 + inputs.positions.div(self.block, rounding_mode="floor")
        return Prediction(
            features=ahead if logits is None else None,
            logits=logits,
            label=column + self.block,
            source=column + self.block - 1 - slot,
            slot=slot,
            group=group,
        )


# --- training -------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_leaves_the_target_alone(tmp_path: Path) -> None:
    module = distillation(max_steps=40)
    before = weights(module)
    frozen = {name: tensor.clone() for name, tensor in module.target.model.state_dict().items()}
    notes = Notes()
    train(module, Data([0, 1] * 20), {**QUIET, "max_steps": 40}, tmp_path, notes, 0)
    losses = notes.series("train/loss")
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert all(not torch.equal(before[name], now) for name, now in weights(module).items())
    for name, tensor in module.target.model.state_dict().items():
        assert torch.equal(tensor, frozen[name])


def test_everything_worth_watching_is_logged(tmp_path: Path) -> None:
    notes = _fit(distillation(block=3), tmp_path, validation=[90, 91], val_check_interval=3)
    logged = {key for _, line in notes.lines for key in line}
    assert logged >= {
        "train/loss",
        "train/loss/feature",
        "train/loss/soft",
        "train/loss/hard",
        "train/position_1/accuracy",
        "train/position_3/accuracy",
        "train/glance_ratio",
        "train/revealed",
        "train/lr",
        "train/grad_norm",
        "train/tokens_per_second",
        "val/loss",
        "val/accept_rate",
        "val/position_1/accept_rate",
        "val/position_3/accept_rate",
        "val/position_2/accuracy",
        "val/expected_accept_length",
        "val/expected_accept_length_sampled",
    }
    assert notes.series("train/glance_ratio") == pytest.approx(
        [0.4 * (6 - i) / 6 for i in range(6)]
    )
    assert sum(notes.series("train/revealed")) > 0


def test_the_parts_of_a_step_are_timed(tmp_path: Path) -> None:
    notes = _fit(distillation(), tmp_path)
    parts = ("data", "teacher", "glance", "student", "loss", "backward", "optimizer")
    times = [notes.series(f"train/time/{part}") for part in parts]
    assert [len(series) for series in times] == [6] * len(parts)
    assert min(map(min, times)) >= 0


def test_what_is_for_the_log_alone_is_computed_in_steps_that_are_logged(tmp_path: Path) -> None:
    module = distillation()
    make, tallies = module.step, []

    def step(given: Batch) -> Any:
        made = make(given)
        train_step = made.train

        def train(ratio: float, *, accuracy: bool = False) -> Any:
            loss, tally = train_step(ratio, accuracy=accuracy)
            tallies.append("train/position_1/accuracy" in tally.reduced())
            return loss, tally

        return SimpleNamespace(train=train)

    module.step = step  # type: ignore[method-assign]
    notes = _fit(module, tmp_path, log_every_n_steps=3)
    assert tallies == [False, False, True, False, False, True]
    assert len(notes.series("train/position_1/accuracy")) == 2
    assert len(notes.series("train/time/teacher")) == 2
    assert len(notes.series("train/loss")) == 2


def test_the_loss_is_the_weighted_sum_of_its_terms(tmp_path: Path) -> None:
    notes = _fit(distillation(), tmp_path)
    feature, soft, hard = (
        torch.tensor(notes.series(f"train/loss/{term}")) for term in ("feature", "soft", "hard")
    )
    expected = feature + 0.09 * soft + 0.01 * hard
    assert torch.allclose(torch.tensor(notes.series("train/loss")), expected, atol=1e-5)


def test_a_checkpoint_holds_the_drafter_and_plain_hyperparameters_alone(tmp_path: Path) -> None:
    module = distillation()
    _fit(module, tmp_path)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert {name.split(".")[0] for name in saved["state_dict"]} == {"drafter"}
    assert saved["hyper_parameters"] == {"name": "test", "nested": {"k": 2}}
    assert saved["target_fingerprint"] == module.target.fingerprint


class Kill(Exception):
    """Stands for a kill in the middle of a run."""


@pytest.mark.parametrize(
    "trainer",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}],
)
@pytest.mark.parametrize("options", [{"block": 2}, {"block": 3, "query": "newest"}])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, trainer: dict[str, Any], options: dict[str, Any]
) -> None:
    whole, killed, resumed = (distillation(**options) for _ in range(3))
    _fit(whole, tmp_path / "whole", **trainer)
    step = killed.training_step

    def dying_step(batch: Batch, batch_idx: int) -> Tensor:
        if killed.global_step == 5:
            raise Kill
        return step(batch, batch_idx)

    killed.training_step = dying_step  # type: ignore[method-assign]
    with pytest.raises(Kill):
        _fit(killed, tmp_path / "resumed", **trainer)
    torch.manual_seed(12345)  # whatever the global generator holds must not matter
    _fit(resumed, tmp_path / "resumed", **trainer)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
        assert tensor.dtype == torch.float32, "the weights keep what half precision would lose"
    name = "fuse.mix.weight_ih_l0"
    assert not torch.equal(weights(killed)[name], weights(whole)[name])


def test_what_begins_a_training_is_not_done_again_when_it_resumes(tmp_path: Path) -> None:
    begun: list[int] = []
    for steps in (3, 6):
        trainer = {**QUIET, "max_steps": steps}
        train(
            distillation(),
            Data(list(range(20))),
            trainer,
            tmp_path,
            checkpoint_every=3,
            begin=partial(begun.append, steps),
        )
    assert begun == [3]


def test_the_seed_decides_the_result(tmp_path: Path) -> None:
    first, again, other = distillation(), distillation(), distillation()
    other.seed = 8
    for name, module in (("first", first), ("again", again), ("other", other)):
        _fit(module, tmp_path / name)
    name = "fuse.mix.weight_ih_l0"
    assert torch.equal(weights(first)[name], weights(again)[name])
    assert not torch.equal(weights(first)[name], weights(other)[name])


def test_a_checkpoint_of_another_target_is_refused(tmp_path: Path) -> None:
    _fit(distillation(), tmp_path)
    other = distillation(target=tiny_target(seed=3))
    with pytest.raises(FalconLabError, match=other.target.fingerprint):
        _fit(other, tmp_path)


def test_a_drafter_handed_over_in_evaluation_mode_is_trained_with_dropout(tmp_path: Path) -> None:
    module = distillation()
    module.drafter.eval()
    modes = []
    module.drafter.register_forward_pre_hook(lambda m, _: modes.append(m.fuse.mix.training))
    _fit(module, tmp_path, max_steps=2)
    assert all(modes)


def test_bf16_touches_the_student_alone(tmp_path: Path) -> None:
    module = distillation()
    teacher, dtypes = module.target.teacher, []

    def watched(*args: Tensor) -> Tensor:
        features = teacher(*args)
        dtypes.append(features.dtype)
        return features

    module.target.teacher = watched  # type: ignore[method-assign]
    notes = _fit(module, tmp_path, precision="bf16-mixed")
    assert set(dtypes) == {torch.float32}
    assert all(0 < loss < 100 for loss in notes.series("train/loss"))


def test_features_from_a_store_make_the_teacher_pass_unnecessary(tmp_path: Path) -> None:
    module, stored = distillation(), distillation()
    one = batch(3)
    kept = module.target.teacher(one.tokens, one.documents, one.positions)

    def absent(*_: Tensor) -> Tensor:
        raise AssertionError("the teacher was asked")

    stored.target.teacher = absent  # type: ignore[method-assign]
    for each, given in ((module, one), (stored, one._replace(features=kept))):
        train(
            each, _Loader([given] * 2), {**QUIET, "max_steps": 2}, tmp_path / str(id(each)), None, 0
        )
    for name, tensor in weights(module).items():
        assert torch.equal(tensor, weights(stored)[name])


class _Loader(Data):
    def __init__(self, batches: list[Batch]) -> None:
        super().__init__([])
        self.batches = batches

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def test_a_batch_without_a_single_label_changes_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    module = distillation(lr=0.1)
    module.config.optimizer.weight_decay = 0.0
    before = weights(module)
    empty = batch(0)._replace(loss_mask=torch.zeros(2, 24, dtype=torch.bool))
    train(module, _Loader([empty] * 2), {**QUIET, "max_steps": 2}, tmp_path, None, 0)
    for name, tensor in weights(module).items():
        assert torch.equal(tensor, before[name])


# --- glancing -------------------------------------------------------------------------------------


class Spy(GlancingSchedule):
    """Shows the first row of every block and takes notes."""

    def __init__(self, *, show: bool) -> None:
        self.show = show
        self.rows: list[GlanceRows] = []

    def ratio(self, progress: float) -> float:
        return 0.5

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        self.rows.append(rows)
        return (rows.slot == 0) & self.show


class Counting(FalconObjective):
    """Notes how many rows count."""

    counts: list[int]

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        self.counts.append(rows.teacher_logits.shape[0])
        return super().__call__(rows)


def _one_step(module: Distillation, folder: Path, seen: list[Any] | None = None) -> None:
    def keep(_module: nn.Module, args: Any, output: Prediction) -> None:
        if seen is not None:
            seen.append((args, output))

    module.drafter.register_forward_hook(keep)
    train(module, Data([3, 4]), {**QUIET, "max_steps": 1}, folder, None, 0)


def test_both_passes_have_the_same_noise_phases_and_dropout_mask(tmp_path: Path) -> None:
    seen: list[Any] = []
    _one_step(distillation(block=3, glancing=Spy(show=False), dropout=0.5), tmp_path, seen)
    (first, without), (second, with_nothing) = seen
    assert torch.equal(first[0].features, second[0].features)
    # A gradient changes kernels, not masks; another mask differs in the first digit.
    assert torch.allclose(without.features, with_nothing.features, atol=1e-5)
    assert not without.features.requires_grad
    assert with_nothing.features.requires_grad


def test_one_teacher_pass_is_studied_under_several_phases_and_noises(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = distillation(block=2, glancing=NoGlancing(None, CONTEXT), repeats=4)
    asked: list[Tensor] = []
    teacher = module.target.teacher

    def count(*args: Tensor) -> Tensor:
        asked.append(args[0])
        return teacher(*args)

    module.target.teacher = count  # type: ignore[method-assign]
    _one_step(module, tmp_path, seen)
    ((inputs, *_), prediction) = seen[0]
    assert [tokens.shape for tokens in asked] == [batch(3).tokens.shape]
    copies = inputs.tokens.chunk(4)
    assert all(torch.equal(copies[0], copy) for copy in copies)
    noises = inputs.features.chunk(4)
    assert not torch.equal(noises[0], noises[1])
    slots = torch.stack(prediction.slot.chunk(4))
    assert (slots[0] != slots[1:]).any()


def test_the_second_pass_is_shown_the_target_s_features_and_tokens(tmp_path: Path) -> None:
    seen: list[Any] = []
    spy = Spy(show=True)
    module = distillation(glancing=spy)
    _one_step(module, tmp_path, seen)
    (first, prediction), (second, _) = seen
    assert first[1] is None
    reveal = second[1]
    given = batch(3)
    truth = module.target.teacher(given.tokens, given.documents, given.positions)
    assert torch.equal(reveal.mask, (prediction.slot == 0) & spy.rows[0].valid)
    for b, r in reveal.mask.nonzero().tolist():
        label = int(prediction.label[b, r])
        assert torch.equal(reveal.features[b, r], truth[b, label])
        assert int(reveal.tokens[b, r]) == int(module.target.head(truth[b, label]).argmax())


def test_revealed_tokens_can_be_the_data_s(tmp_path: Path) -> None:
    seen: list[Any] = []
    spy = Spy(show=True)
    spy.token_source = "data"
    _one_step(distillation(glancing=spy), tmp_path, seen)
    (_, prediction), (second, _) = seen
    given = batch(3)
    for b, r in second[1].mask.nonzero().tolist():
        assert second[1].tokens[b, r] == given.tokens[b, int(prediction.label[b, r]) + 1]


def test_the_schedule_is_told_where_the_first_pass_was_wrong(tmp_path: Path) -> None:
    spy = Spy(show=False)
    seen: list[Any] = []
    module = distillation(glancing=spy)
    _one_step(module, tmp_path, seen)
    (_, prediction), _ = seen
    (rows,) = spy.rows
    given = batch(3)
    truth = module.target.teacher(given.tokens, given.documents, given.positions)
    for b, r in rows.valid.nonzero().tolist():
        student = module.target.head(prediction.features[b, r]).argmax()
        teacher = module.target.head(truth[b, int(prediction.label[b, r])]).argmax()
        assert bool(rows.wrong[b, r]) == bool(student != teacher)
    assert not (rows.wrong & ~rows.valid).any()


@pytest.mark.parametrize("kept", [True, False])
def test_revealed_rows_stay_in_the_loss_or_leave_it(tmp_path: Path, kept: bool) -> None:
    spy = Spy(show=True)
    spy.keep_revealed_in_loss = kept
    objective = Counting(FalconObjectiveConfig(), CONTEXT)
    objective.counts = []
    _one_step(distillation(glancing=spy, objective=objective), tmp_path)
    (rows,) = spy.rows
    hidden = 0 if kept else int((rows.valid & (rows.slot == 0)).sum())
    assert objective.counts == [int(rows.valid.sum()) - hidden]


def test_without_glancing_there_is_one_pass(tmp_path: Path) -> None:
    for name, schedule in (
        ("none", NoGlancing(None, CONTEXT)),
        ("zero", Csgd(CsgdConfig(start=0.0), CONTEXT)),
    ):
        seen: list[Any] = []
        _one_step(distillation(glancing=schedule), tmp_path / name, seen)
        assert len(seen) == 1


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("as_logits", [False, True])
def test_a_perfect_drafter_is_accepted_always(tmp_path: Path, block: int, as_logits: bool) -> None:
    """And one that gives logits and no features is trained by the same module."""
    target = tiny_target()
    perfect = Perfect(block, as_logits=target.head if as_logits else None)
    objective = FalconObjective(FalconObjectiveConfig(feature=0.0), CONTEXT)
    module = distillation(
        target=target,
        drafter=perfect,
        objective=objective,
        lr=0.0,
        glancing=NoGlancing(None, CONTEXT),
    )
    notes = _fit(module, tmp_path, validation=[5, 6], val_check_interval=3)
    assert notes.series("val/accept_rate")[-1] == pytest.approx(1, abs=1e-5)
    assert notes.series(f"val/position_{block}/accuracy")[-1] == 1
    assert notes.series("val/expected_accept_length")[-1] == 1 + block
    assert notes.series("val/expected_accept_length_sampled")[-1] == pytest.approx(
        1 + block, abs=1e-4
    )
    assert notes.series("val/loss/soft")[-1] == pytest.approx(0, abs=1e-5)


def test_validation_is_the_same_each_time(tmp_path: Path) -> None:
    module = distillation(lr=0.0)
    module.config.optimizer.weight_decay = 0.0
    notes = _fit(module, tmp_path, validation=[5, 6], val_check_interval=3)
    first, second = notes.series("val/loss")
    assert first == second


# --- going wrong ----------------------------------------------------------------------------------


class Spoilt(FalconObjective):
    """Goes wrong at a call: with a loss that is not a number, or with its gradient alone."""

    calls = 0
    spoil: str

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        self.calls += 1
        terms = super().__call__(rows)
        if self.calls == 5 and self.spoil == "loss":
            terms["soft"] = terms["soft"] * torch.nan
        if self.calls == 5 and self.spoil == "gradient":
            terms["soft"] = terms["soft"] + (rows.student_features * 0).sum(-1).sqrt()
        return terms


class WithLaterHead(Perfect):
    """Has a weight for a second pass, which one pass of training does not reach."""

    def __init__(self, block: int) -> None:
        super().__init__(block)
        self.later = nn.Linear(1, 1, bias=False)

    def unroll(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Iterator[Prediction]:
        first = self(inputs, reveal)
        assert first.features is not None
        yield first
        ahead = self.later(first.features.roll(-self.block, 1).unsqueeze(-1)).squeeze(-1)
        yield replace(first, features=ahead, label=first.label + self.block)


@pytest.mark.parametrize("unroll", [1, 2])
def test_weights_that_the_first_step_does_not_reach_are_named(tmp_path: Path, unroll: int) -> None:
    module = distillation(drafter=WithLaterHead(2), unroll=unroll)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(module, tmp_path)
    said = [str(one.message) for one in caught if "does not reach" in str(one.message)]
    assert len(said) == (unroll == 1)
    assert all("later.weight" in line and "distillation.unroll" in line for line in said)


@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_a_number_that_is_none_stops_the_training_at_its_step(tmp_path: Path, spoil: str) -> None:
    objective = Spoilt(FalconObjectiveConfig(), CONTEXT)
    objective.spoil = spoil
    module = distillation(objective=objective)
    with pytest.raises(FalconLabError, match=f"the {spoil} is nan at step 4"):
        _fit(module, tmp_path)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())
    assert all(tensor.isfinite().all() for tensor in weights(module).values())
