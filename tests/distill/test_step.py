"""What a step makes of a batch, without a trainer, and its clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distilling import batch, distillation
from fakes.clock import Clock
from fakes.drafters import TrainedAlone
from falcon_lab.distill.metrics import means
from falcon_lab.distill.rows import label_rows
from falcon_lab.distill.step import StepClock
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, GlanceRows
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import FalconObjectiveConfig
from falcon_lab.plugins.discovery import load_components
from tiny_models import tiny_target


def test_features_can_be_saved_for_a_backward_pass() -> None:
    """Those of inference mode cannot."""
    module, given = distillation(), batch(3)
    features = module.step(given).teacher_pass().features
    assert torch.equal(
        features, module.target.teacher(given.tokens, given.documents, given.positions)
    )
    weight = torch.ones(32, requires_grad=True)
    (features * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_the_glance_costs_one_student_pass_and_no_pass_of_the_target() -> None:
    module, given = distillation(repeats=2), batch(3)
    passes, reads, heads = [], [], []
    module.drafter.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    teacher, head = module.target.teacher, module.target.head

    def read(*args: Tensor) -> Tensor:
        reads.append(1)
        return teacher(*args)

    def ask(features: Tensor) -> Tensor:
        heads.append((len(features), features.requires_grad))
        return head(features)

    module.target.teacher, module.target.head = read, ask  # type: ignore[method-assign]
    _, tally = module.step(given).train(0.4)
    rows = int(tally.reduced()["train/loss"][1])
    labelled = 2 * (24 - 2)  # of two documents in each of two sequences, all but the last token
    assert passes == [False, True]
    assert reads == [1]
    # The student's rows in both passes; the target's once, however often they are studied.
    assert heads == [(rows, False), (labelled, False), (rows, True)]


def test_own_features_take_the_same_first_pass() -> None:
    module, given, passes = distillation(), batch(3), []
    module.config.own_features = 1.0
    module.drafter.register_forward_hook(lambda _, args, __: passes.append(args[0].features))
    loss, tally = module.step(given).train(0.4)
    assert len(passes) == 2
    assert not torch.equal(passes[0], passes[1])
    assert means(tally.reduced())["train/loss"] > 0
    assert loss.requires_grad


def _expected(module: Any, passes: int) -> list[tuple[float, int]]:
    """Loss and rows of each pass, row by row from what the drafter predicts."""
    step, given = module.step(batch(3)), batch(3)
    teacher = step.teacher_pass()
    inputs = step.inputs(given, teacher.features, None, module.config.noise)
    found = []
    for prediction in step.student_passes(inputs, None)[:passes]:
        labels = label_rows(given, prediction)
        assert prediction.features is not None
        wanted = labels.features(teacher.features)
        error = nn.functional.smooth_l1_loss(prediction.features, wanted, reduction="none")
        found.append((float(error.detach().mean(-1)[labels.valid].sum()), int(labels.valid.sum())))
    return found


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_loss_of_unrolled_passes_is_a_mean_over_all_their_rows(decay: float) -> None:
    nowhere: Any = None
    features_alone = FalconObjectiveConfig(soft=0, hard=0)
    objective = FalconObjective(features_alone, BuildContext(nowhere))
    module = distillation(unroll=3, objective=objective, block=2)
    module.config.unroll_decay = decay
    expected = _expected(module, 3)
    assert expected[0][1] > expected[1][1] > expected[2][1] > 0
    weights = [decay**number for number in range(3)]
    loss, tally = module.step(batch(3)).train(0.0, accuracy=True)
    total = sum(w * part for w, (part, _) in zip(weights, expected, strict=True))
    count = sum(w * rows for w, (_, rows) in zip(weights, expected, strict=True))
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)
    assert means(tally.reduced())["train/loss"] == pytest.approx(total / count, rel=1e-4)
    assert {"train/position_2/accuracy", "train/pass_3/position_2/accuracy"} <= set(tally.reduced())


def test_the_first_of_unrolled_passes_is_glanced_at_as_ever() -> None:
    outputs = []
    for unroll in (1, 2):
        module = distillation(unroll=unroll, block=2, dropout=0.3)
        step = module.step(batch(3))
        inputs = step.inputs(batch(3), step.teacher_pass().features, None, 0.1)
        first, whole = step.student_passes(inputs, passes=1), step.student_passes(inputs)
        outputs += [first[0].features, whole[0].features]
    for features in outputs:
        assert torch.allclose(features, outputs[0], atol=1e-5)
    loss, _ = module.step(batch(3)).train(0.4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.drafter.parameters())


def test_a_drafter_that_cannot_go_on_from_itself_is_refused() -> None:
    class Deaf(nn.Linear, TrainedAlone):
        """Has weights."""

    with pytest.raises(FalconLabError, match=r"Deaf cannot continue .* distillation\.unroll=1"):
        distillation(drafter=Deaf(1, 1), unroll=2)


def test_what_is_compiled_is_not_unrolled() -> None:
    with pytest.raises(FalconLabError, match=r"distillation\.compile=false"):
        distillation(unroll=2, compiled=True)


def test_the_loss_has_the_rows_that_the_schedule_chooses_by_the_pass_that_is_learnt_from() -> None:
    node = {"name": "valid_prefix", "schedule": {"name": "csgd", "revealed_in_loss": False}}
    context = BuildContext(tiny_target(), 3)
    schedule = load_components().build("schedule", node, context)
    module, given, passes = distillation(glancing=schedule, block=3), batch(3, length=40), []
    module.drafter.register_forward_hook(lambda _, args, out: passes.append((args, out)))
    loss, tally = module.step(given).train(0.8)
    (_, reveal), learnt = passes[1]
    labels = label_rows(given, learnt)
    teacher = module.step(given).teacher_pass()
    wrong = torch.zeros_like(labels.valid)
    for b, r in labels.valid.nonzero().tolist():
        drafted = module.target.head(learnt.features[b, r]).argmax()
        right = module.target.head(teacher.features[b, labels.label[b, r]]).argmax()
        wrong[b, r] = drafted != right
    where = learnt.slot, learnt.group, 3
    kept = schedule.counts(GlanceRows(wrong, labels.valid, *where)) & ~reveal.mask
    reduced = tally.reduced()
    assert 0 < int(kept.sum()) < int(labels.valid.sum())
    assert reduced["train/loss"][1] == int(kept.sum())
    assert reduced["train/kept"] == (int(kept.sum()), int(labels.valid.sum()))
    assert loss.requires_grad


def test_a_schedule_that_chooses_nothing_says_nothing_about_it() -> None:
    assert "train/kept" not in distillation().step(batch(3)).train(0.4)[1].reduced()


# --- the clock ----------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    passing = Clock()
    monkeypatch.setattr("time.perf_counter", passing)
    return passing


def test_each_part_gets_its_own_seconds(time: Clock) -> None:
    clock = StepClock()
    time.now += 2
    clock.begin(CPU, wanted=True)
    for name, seconds in (("teacher", 3), ("student", 1), ("teacher", 4)):
        time.now += seconds
        clock.lap(name)
    time.now += 50  # nobody's
    clock.mark()
    assert clock.seconds == {"data": 2, "teacher": 7, "student": 1}


def test_a_step_begins_anew(time: Clock) -> None:
    clock = StepClock()
    clock.begin(CPU, wanted=False)
    time.now += 1
    clock.lap("teacher")
    time.now += 5
    clock.begin(CPU, wanted=True)
    assert clock.seconds == {"data": 5}


def test_a_gpu_is_waited_for_in_steps_that_are_wanted_alone(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock, gpu = StepClock(), torch.device("cuda")
    clock.begin(gpu, wanted=False)
    clock.lap("teacher")
    assert waits == []
    clock.begin(gpu, wanted=True)
    clock.lap("teacher")
    assert waits == [gpu, gpu]
    clock.begin(CPU, wanted=True)
    clock.lap("teacher")
    assert len(waits) == 2
