"""Falcon's objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, LabelledRows, Objective
from falcon_lab.objectives import CACHED, NO_LABEL, FalconObjective, soft_and_hard
from falcon_lab.plugins.builtins import FalconObjectiveConfig

# --- falcon objective -------------------------------------------------------------------------


def _objective(**options: Any) -> FalconObjective:
    host: Any = None
    return FalconObjective(FalconObjectiveConfig(**options), BuildContext(host))


def _rows(count: int = 7, vocabulary: int = 11, hidden: int = 5, seed: int = 0) -> LabelledRows:
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> torch.Tensor:
        return 2 * torch.randn(count, width, generator=generator)

    tokens = torch.randint(0, vocabulary, (count,), generator=generator)
    student = draw(hidden), draw(vocabulary)
    return LabelledRows(*student, draw(hidden), draw(vocabulary), tokens, generator, tokens)


def _with(rows: LabelledRows, **changes: Any) -> LabelledRows:
    fields = LabelledRows.__slots__
    return LabelledRows(**{name: changes.get(name, getattr(rows, name)) for name in fields})


def test_the_default_weights_are_the_paper_s() -> None:
    objective: Objective = _objective()
    assert objective.weights == {"feature": 1.0, "soft": 0.09, "hard": 0.01}


def test_every_term_comes_per_row() -> None:
    terms = _objective()(_rows())
    assert {name: term.shape for name, term in terms.items()} == {
        "feature": (7,),
        "soft": (7,),
        "hard": (7,),
    }


def test_terms_without_weight_are_not_computed() -> None:
    assert _objective(feature=0.0, hard=0.0)(_rows()).keys() == {"soft"}


def test_the_feature_term_is_smooth_l1_over_the_width() -> None:
    rows = _rows()
    assert rows.student_features is not None
    difference = (rows.student_features - rows.teacher_features).abs()
    expected = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean(-1)
    assert torch.allclose(_objective()(rows)["feature"], expected)


def test_a_drafter_without_features_is_told_which_key_to_set() -> None:
    rows = _with(_rows(), student_features=None)
    with pytest.raises(FalconLabError, match=r"objective\.feature=0"):
        _objective()(rows)
    assert "feature" not in _objective(feature=0.0)(rows)


def test_the_soft_term_is_the_divergence_of_student_from_teacher() -> None:
    rows = _rows()
    p = torch.distributions.Categorical(logits=rows.teacher_logits)
    q = torch.distributions.Categorical(logits=rows.student_logits)
    assert torch.allclose(
        _objective()(rows)["soft"], torch.distributions.kl_divergence(p, q), atol=1e-6
    )
    same = _objective()(_with(rows, student_logits=rows.teacher_logits))["soft"]
    assert torch.allclose(same, torch.zeros(7), atol=1e-6)


def test_the_other_forms_are_squared_distances_and_absolute_ones() -> None:
    rows = _rows()
    assert rows.student_features is not None
    found = _objective(feature_form="mse", soft_form="l1")(rows)
    squared = (rows.student_features - rows.teacher_features).square().mean(-1)
    torch.testing.assert_close(found["feature"], squared)
    p, q = (of.softmax(-1) for of in (rows.teacher_logits, rows.student_logits))
    torch.testing.assert_close(found["soft"], 2 * (1 - torch.minimum(p, q).sum(-1)))


def test_the_tempered_form_is_upstream_s_mixture() -> None:
    rows = _rows()
    p = rows.teacher_logits.softmax(-1)
    teacher = (rows.teacher_logits / 0.95).softmax(-1)
    student = (rows.student_logits / 0.95).softmax(-1)
    expected = (p * torch.log(teacher / (student + 1e-8))).sum(-1)
    assert torch.allclose(_objective(soft_form="tempered")(rows)["soft"], expected, atol=1e-5)


@pytest.mark.parametrize("form", ["kl", "tempered"])
def test_certain_distributions_give_no_nan(form: str) -> None:
    rows = _rows()
    sure = functional.one_hot(rows.tokens, 11).float() * 1000
    student = rows.student_logits.clone().requires_grad_()
    soft = _objective(soft_form=form)(_with(rows, teacher_logits=sure, student_logits=student))
    soft["soft"].sum().backward()
    assert soft["soft"].isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("label", ["argmax", "data"])
def test_the_hard_term_is_the_cross_entropy_with_its_label(label: str) -> None:
    rows = _rows()
    labels = rows.tokens if label == "data" else rows.teacher_logits.argmax(-1)
    expected = -rows.student_logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert torch.allclose(_objective(hard_label=label)(rows)["hard"], expected)


def test_rows_without_a_data_token_have_no_data_loss() -> None:
    rows = _rows()
    rows.tokens[2] = -100
    hard = _objective(hard_label="data")(rows)["hard"]
    assert hard[2] == 0
    assert (hard[[0, 1, 3]] > 0).all()


def test_sampled_labels_follow_the_target_and_the_generator() -> None:
    count = 20_000
    teacher = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().expand(count, 4)
    rows = _with(_rows(count, 4), teacher_logits=teacher)
    objective = _objective(hard_label="sampled")
    labels = []
    for _ in range(2):
        rows.generator.manual_seed(3)
        labels.append(objective._labels(rows))
    assert torch.equal(*labels)
    frequencies = labels[0].bincount(minlength=4) / count
    assert torch.allclose(frequencies, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.015)
    assert frequencies[3] == 0


def test_no_rows_at_all_are_no_error() -> None:
    rows = _rows(0)
    assert all(term.shape == (0,) for term in _objective()(rows).values())


def test_half_precision_logits_are_compared_in_full_precision() -> None:
    rows = _rows()
    low = _with(rows, student_logits=rows.student_logits.bfloat16())
    assert all(term.dtype == torch.float32 for term in _objective()(low).values())


def test_later_rows_of_a_block_can_count_less() -> None:
    rows = _with(_rows(6), slot=torch.arange(6) % 3)
    even, falling = _objective(hard=0.5)(rows), _objective(hard=0.5, slot_decay=0.5)(rows)
    weight = torch.tensor([1.0, 0.5, 0.25, 1.0, 0.5, 0.25])
    for name, term in even.items():
        torch.testing.assert_close(falling[name], term * weight)


# --- soft and hard ----------------------------------------------------------------------------


def _given(seed: int, rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        5 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) for _ in "ab"
    )
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = NO_LABEL
    return student.requires_grad_(), teacher, labels


@settings(max_examples=40)
@given(seed=st.integers(0, 999), rows=st.integers(0, 6), vocabulary=st.integers(1, 9))
def test_values_and_gradients_are_those_of_the_definitions(
    seed: int, rows: int, vocabulary: int
) -> None:
    student, teacher, labels = _given(seed, rows, vocabulary)
    weights = torch.linspace(0.5, 2, 2 * rows, dtype=torch.float64).view(2, rows)
    soft, hard = soft_and_hard(student, teacher, labels)
    ((weights[0] * soft + weights[1] * hard).sum()).backward()  # type: ignore[no-untyped-call]
    found, student.grad = student.grad, None
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    entropy = functional.cross_entropy(student, labels, reduction="none", ignore_index=NO_LABEL)
    ((weights[0] * divergence + weights[1] * entropy).sum()).backward()
    assert torch.allclose(soft, divergence)
    assert torch.allclose(hard, entropy)
    assert found is not None
    assert student.grad is not None
    assert torch.allclose(found, student.grad)


def test_the_logits_are_left_as_they_are() -> None:
    student, teacher, labels = _given(0, 3, 5)
    before = student.detach().clone(), teacher.clone()
    soft_and_hard(student, teacher, labels)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(student.detach(), before[0])
    assert torch.equal(teacher, before[1])


def test_the_gradient_is_that_of_small_differences() -> None:
    student, teacher, labels = _given(3, 4, 7)
    assert torch.autograd.gradcheck(lambda logits: soft_and_hard(logits, teacher, labels), student)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_at_a_time_give_what_all_rows_give(dtype: torch.dtype) -> None:
    student, teacher = (_given(seed, 5, CACHED // 2)[1].to(dtype) for seed in (1, 2))
    labels, student = torch.tensor([3, NO_LABEL, 7, 0, NO_LABEL]), student.requires_grad_()
    soft, hard = soft_and_hard(student, teacher, labels)
    (soft + 2 * hard).sum().backward()  # type: ignore[no-untyped-call]
    whole = student.detach().float().requires_grad_()
    log_p, log_q = teacher.float().log_softmax(-1), whole.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    entropy = functional.cross_entropy(whole, labels, reduction="none", ignore_index=NO_LABEL)
    (divergence + 2 * entropy).sum().backward()
    torch.testing.assert_close(soft, divergence)
    torch.testing.assert_close(hard, entropy)
    assert student.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(student.grad, whole.grad.to(dtype), rtol=2e-2, atol=1e-7)


def test_nothing_but_the_logits_is_kept_for_the_backward_pass() -> None:
    student, teacher, labels = _given(0, 3, 5)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        soft_and_hard(student, teacher, labels)
    known = {each.data_ptr() for each in (student, teacher, labels)}
    assert {each.data_ptr() for each in kept} == known
