"""The check of an objective.

Shapes: R' rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, LabelledRows
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

ROWS, VOCABULARY, HIDDEN = 12, 10, 8


def check_objective(objective: Recipe, *, block: int = 2, seed: int = 0) -> None:
    """Check that an objective does what its kind requires.

    - Its terms are named as its ``weights``, one number a row, without nan even for rows that are
      very sure or have no token; no rows give no numbers.
    - A row's terms depend on that row alone: in parts, the numbers are those of the whole.
    - The student learns: gradients are numbers and not all zero; nothing of what is given is
      changed. Its random numbers come from ``rows.generator``.
    - A drafter without features is served, or refused with a ``FalconLabError``.

    Args:
        objective: a YAML node, or what builds an objective from a ``BuildContext``.
        block: k of the drafter.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("objective", objective, seed)
    target = tiny_target(vocab=VOCABULARY, hidden=HIDDEN)
    made = tested.build(BuildContext(target, block))
    weights = getattr(made, "weights", None)
    tested.expect(
        isinstance(weights, Mapping) and len(weights) > 0,
        "weights",
        expected="a mapping from the names of its terms to numbers",
        found=repr(weights),
        fix="name at least one term",
    )
    rows = random_rows(tested, block)
    for what, check in (
        ("its terms", check_terms),
        ("that rows are separate", check_parts),
        ("gradients", check_gradients),
        ("rows at the edges", check_edges),
        ("a drafter without features", check_without_features),
    ):
        with tested.checking(what):
            check(tested, made, rows)


def random_rows(tested: ComponentUnderTest, block: int, *, scale: float = 1.5) -> LabelledRows:
    """Make rows of a student beside those of its teacher."""
    generator = tested.generator(90)

    def draw(width: int) -> Tensor:
        return scale * torch.randn(ROWS, width, generator=generator)

    tokens = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    tokens[3] = -100
    parts = draw(HIDDEN), draw(VOCABULARY), draw(HIDDEN), draw(VOCABULARY)
    place = torch.arange(ROWS)
    drawn = tested.generator(91)
    return LabelledRows(*parts, tokens, drawn, place % block, group=place // block)


def _terms(tested: ComponentUnderTest, objective: Any, rows: LabelledRows) -> dict[str, Tensor]:
    terms: dict[str, Tensor] = objective(rows)
    names = sorted(objective.weights)
    tested.expect(
        sorted(terms) == names,
        "the names of its terms",
        expected=f"those of its weights, {names}",
        found=sorted(terms),
        fix="give every term that has a weight, and no other",
    )
    count = rows.student_logits.shape[0]
    for name, term in terms.items():
        tested.expect(
            list(term.shape) == [count] and term.is_floating_point(),
            f"the shape of the term {name!r}",
            expected=f"one number a row, [{count}]",
            found=f"{list(term.shape)} ({term.dtype})",
            fix="take no mean over rows: the step does",
        )
        tested.expect(
            bool(term.isfinite().all()),
            f"the term {name!r}",
            expected="numbers",
            found=term.tolist(),
            fix="compute with log_softmax in float32, and leave rows without a token (-100) at 0",
        )
    return terms


def _again(rows: LabelledRows, tested: ComponentUnderTest) -> LabelledRows:
    return replace(rows, generator=tested.generator(91))


def check_terms(tested: ComponentUnderTest, objective: Any, rows: LabelledRows) -> None:
    """Check names, shapes and reproducibility, and that nothing given is changed."""
    before = {name: _cloned(getattr(rows, name)) for name in rows.__dataclass_fields__}
    first = _terms(tested, objective, _again(rows, tested))
    second = _terms(tested, objective, _again(rows, tested))
    _expect_equal(
        tested,
        "its terms with the same generator",
        second,
        first,
        "draw from rows.generator, never from torch's global one",
    )
    changed = [
        name
        for name, value in before.items()
        if isinstance(value, Tensor) and not torch.equal(value, getattr(rows, name))
    ]
    tested.expect(
        not changed,
        "the rows that it is given",
        expected="left as they are",
        found=f"{', '.join(changed)} changed in place",
        fix="use no operation that ends in an underscore on them",
    )


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _part(rows: LabelledRows, part: slice) -> LabelledRows:
    tensors: dict[str, Any] = {
        name: value[part]
        for name in rows.__dataclass_fields__
        if isinstance(value := getattr(rows, name), Tensor)
    }
    return replace(rows, **tensors)


def check_parts(tested: ComponentUnderTest, objective: Any, rows: LabelledRows) -> None:
    """Check the terms in parts: the rows of a step come in as many calls as memory allows."""
    whole = _terms(tested, objective, _again(rows, tested))
    again = _again(rows, tested)  # its generator continues from part to part
    size = 5
    if objective.whole_groups:
        assert rows.group is not None
        size = 2 * int((rows.group == 0).sum())
    parts = [
        _terms(tested, objective, _part(again, slice(start, start + size)))
        for start in range(0, ROWS, size)
    ]
    found = {name: torch.cat([part[name] for part in parts]) for name in whole}
    _expect_equal(
        tested,
        f"its terms in parts of {size} rows",
        found,
        whole,
        "a term of a row may depend on that row alone (on its block with whole_groups), and take "
        "as many draws for every row; no mean or normalisation over rows",
    )


def _expect_equal(
    tested: ComponentUnderTest,
    what: str,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    fix: str,
) -> None:
    for name, term in expected.items():
        apart = float((found[name] - term).abs().max()) if len(term) else 0.0
        tested.expect(
            apart < 1e-5 * max(1.0, float(term.abs().max())),
            f"{what} ({name!r})",
            expected=[round(value, 4) for value in term.tolist()],
            found=[round(value, 4) for value in found[name].tolist()],
            fix=fix,
        )


def check_gradients(tested: ComponentUnderTest, objective: Any, rows: LabelledRows) -> None:
    """Check the gradients of the weighted sum with respect to the student's rows."""
    assert rows.student_features is not None
    student = rows.student_features.clone().requires_grad_()
    logits = rows.student_logits.clone().requires_grad_()
    given = replace(_again(rows, tested), student_features=student, student_logits=logits)
    terms = _terms(tested, objective, given)
    loss = torch.stack([w * terms[name].sum() for name, w in objective.weights.items()]).sum()
    tested.expect(
        loss.requires_grad,
        "the loss",
        expected="a gradient",
        found="none",
        fix="compute the terms from student_features or student_logits, without detaching them",
    )
    loss.backward()
    gradients = [each.grad for each in (student, logits) if each.grad is not None]
    tested.expect(
        all(bool(each.isfinite().all()) for each in gradients)
        and any(bool(each.any()) for each in gradients),
        "gradients of the student's rows",
        expected="numbers that are not all 0",
        found=[float(each.abs().max()) for each in gradients],
        fix="look for a root or a logarithm of 0, and for argmax or detach on the way",
    )


def check_edges(tested: ComponentUnderTest, objective: Any, rows: LabelledRows) -> None:
    """Check no rows, very sure rows, a student that is its teacher, and no tokens at all."""
    same = replace(rows, student_features=rows.teacher_features, student_logits=rows.teacher_logits)
    sure = replace(
        rows,
        student_logits=40 * rows.student_logits,
        teacher_logits=40 * rows.teacher_logits,
    )
    tokenless = replace(rows, tokens=torch.full_like(rows.tokens, -100))
    for edge in (_part(rows, slice(0, 0)), _part(rows, slice(3, 4)), same, sure, tokenless):
        logits = edge.student_logits.clone().requires_grad_()
        terms = _terms(tested, objective, replace(_again(edge, tested), student_logits=logits))
        loss = torch.stack([term.sum() for term in terms.values()]).sum()
        if loss.requires_grad:
            loss.backward()
        tested.expect(
            logits.grad is None or bool(logits.grad.isfinite().all()),
            "gradients at the edges (equal or very sure rows)",
            expected="numbers",
            found="nan or inf",
            fix="compute with log_softmax in float32",
        )


def check_without_features(tested: ComponentUnderTest, objective: Any, rows: LabelledRows) -> None:
    """Check the terms of a drafter that predicts tokens alone."""
    try:
        _terms(tested, objective, replace(_again(rows, tested), student_features=None))
    except FalconLabError as error:
        if isinstance(error, AssertionError):
            raise
