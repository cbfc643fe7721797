from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from falcon_lab.objectives import NO_LABEL, soft_and_hard


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
