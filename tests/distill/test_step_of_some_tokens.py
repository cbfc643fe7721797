"""What a drafter of some tokens alone is taught, compared with, and shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distilling import batch, distillation
from falcon_lab.distill.metrics import Tally, agreement, means, overlap
from falcon_lab.distill.module import Distillation
from falcon_lab.distill.rows import StudentRows, label_rows
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext, DraftVocabulary, LabelledRows
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import FalconConfig, FalconObjectiveConfig
from tiny_models import tiny_target

V, SIZE = 64, 20
TARGET = tiny_target()
TERMS = {"feature": 0.0, "soft": 1.0, "hard": 1.0}


def module(size: int = SIZE, **options: Any) -> Distillation:
    """A training of Falcon over ``size`` tokens; all V of them are still a draft vocabulary."""
    torch.manual_seed(1)
    made = FalconDrafter(FalconConfig(), BuildContext(TARGET))
    counts = torch.randperm(V, generator=torch.Generator().manual_seed(2))
    made.draft_vocabulary = DraftVocabulary(TARGET, size, counts)
    return distillation(target=TARGET, drafter=made, **options)


def rows_of(size: int) -> tuple[LabelledRows, StudentRows, Tensor, Tensor]:
    """Compared rows; the rows themselves; the logits of both over all tokens."""
    step, given = module(size).step(batch(3)), batch(3)
    teacher = step.teacher_pass(mass=True)
    inputs = step.inputs(given, teacher.features, None, 0.0)
    prediction = step.student_passes(inputs)[0]
    rows = StudentRows.of(prediction, label_rows(given, prediction), given.tokens.shape)
    assert rows.features is not None
    flat = teacher.features.flatten(0, 1)
    both = TARGET.head(rows.features), TARGET.head(flat[rows.positions])
    return teacher.compare(rows, torch.Generator()), rows, *both


@pytest.mark.parametrize("label", ["argmax", "data"])
def test_terms_are_those_of_the_columns_where_the_label_has_one(label: str) -> None:
    compared, rows, student, teacher = rows_of(SIZE)
    config = FalconObjectiveConfig(hard_label=label, **TERMS)
    terms = FalconObjective(config, BuildContext(TARGET))(compared)
    ids = module().drafter.draft_vocabulary.ids.tolist()
    outside = 0
    for n, best in enumerate(teacher.argmax(-1).tolist()):
        p, log_q = teacher[n, ids].softmax(-1), student[n, ids].log_softmax(-1)
        soft = (p * (p.log() - log_q)).sum() if best in ids else torch.zeros(())
        wanted = best if label == "argmax" else int(rows.tokens[n])
        hard = -log_q[ids.index(wanted)] if wanted in ids else torch.zeros(())
        torch.testing.assert_close(terms["soft"][n], soft, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(terms["hard"][n], hard, atol=1e-5, rtol=1e-4)
        outside += wanted not in ids
    assert 0 < outside < len(rows)


def test_drawn_labels_have_columns_where_the_likeliest_token_has_one() -> None:
    compared, *_, teacher = rows_of(SIZE)
    config = FalconObjectiveConfig(hard_label="sampled", feature=0.0, soft=0.0, hard=1.0)
    hard = FalconObjective(config, BuildContext(TARGET))(compared)["hard"]
    known = torch.isin(teacher.argmax(-1), module().drafter.draft_vocabulary.ids)
    assert torch.equal(hard > 0, known)


def test_a_vocabulary_of_all_tokens_changes_nothing() -> None:
    found = []
    for training in (module(V), distillation(target=TARGET)):
        loss, tally = training.step(batch(3)).train(0.4, accuracy=True)
        loss.backward()  # type: ignore[no-untyped-call]
        seen = Tally(loss.device)
        training.drafter.eval()
        training.step(batch(4)).validate(0, seen)
        gradients = {n: w.grad for n, w in training.drafter.named_parameters()}
        found.append((loss.detach(), means(tally.reduced()), means(seen.reduced()), gradients))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("glanced", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
def test_parts_teach_what_the_whole_teaches(rows: int, glanced: bool) -> None:
    losses = []
    for chunk in (None, rows):
        training = module()
        training.chunk = chunk
        loss, _ = training.step(batch(3)).train(0.4 if glanced else 0.0)
        loss.backward()  # type: ignore[no-untyped-call]
        weights = {n: w.grad for n, w in training.drafter.named_parameters()}
        losses.append((loss.detach(), weights))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)


def test_what_is_accepted_is_counted_of_all_that_the_target_says() -> None:
    compared, rows, student, teacher = rows_of(SIZE)
    ids = module().drafter.draft_vocabulary.ids
    q = torch.zeros(len(rows), V)
    q[:, ids] = student[:, ids].softmax(-1)
    accepted = torch.minimum(teacher.softmax(-1), q).sum(-1)
    torch.testing.assert_close(overlap(compared), accepted)
    assert torch.equal(agreement(compared), q.argmax(-1) == teacher.argmax(-1))


def test_a_glance_shows_the_targets_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    training, shown = module(), []
    forward = training.drafter.forward

    def seen(inputs: Any, reveal: Any = None) -> Any:
        shown.append(reveal)
        return forward(inputs, reveal)

    monkeypatch.setattr(training.drafter, "forward", seen)
    training.step(batch(3)).train(1.0)
    blind, reveal = shown
    assert blind is None
    tokens, given = reveal.tokens[reveal.mask], batch(3)
    features = TARGET.teacher(given.tokens, given.documents, given.positions)
    best = TARGET.head(features).argmax(-1)
    label = torch.arange(reveal.mask.shape[1]) + training.drafter.block
    right = best[:, label.clamp_max(23)][reveal.mask]
    assert torch.equal(tokens, right)
    assert not torch.isin(tokens, training.drafter.draft_vocabulary.ids).all()


def test_a_row_whose_token_has_no_column_is_wrong() -> None:
    step, given = module().step(batch(3)), batch(3)
    teacher = step.teacher_pass()
    prediction = step.student_passes(step.inputs(given, teacher.features, None, 0.0))[0]
    labels = label_rows(given, prediction)
    rows, right = step._wrong(teacher, prediction, labels)
    outside = ~torch.isin(right, module().drafter.draft_vocabulary.ids) & labels.valid
    assert outside.any()
    assert rows.wrong[outside].all()
    own = replace(prediction, features=labels.features(teacher.features))
    rows, _ = step._wrong(teacher, own, labels)
    assert torch.equal(rows.wrong, outside)
