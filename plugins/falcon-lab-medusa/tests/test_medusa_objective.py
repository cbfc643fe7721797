from __future__ import annotations

from typing import Any

import pytest
import torch
from falcon_lab_medusa import MedusaObjectiveConfig
from falcon_lab_medusa.objective import MedusaObjective
from torch import Tensor

from falcon_lab import fields
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import BuildContext, LabelledRows

HOST: Any = None


def rows(count: int = 12, heads: int = 3) -> LabelledRows:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, count, 7, generator=generator)
    tokens = torch.randint(0, 7, (count,), generator=generator)
    tokens[3] = -100
    slot = torch.arange(count) % heads
    return LabelledRows(None, student, torch.zeros(count, 1), teacher, tokens, generator, slot)


def terms(given: LabelledRows, **options: Any) -> Tensor:
    objective = MedusaObjective(MedusaObjectiveConfig(**options), BuildContext(HOST, block=3))
    assert objective.weights == {"medusa": 3.0}
    return objective(given)["medusa"]


def test_each_head_s_cross_entropy_has_its_weight() -> None:
    given, heads = rows(), 3
    found = terms(given, decay=0.5)
    for row in range(12):
        token = int(given.tokens[row])
        own = 0.0 if token < 0 else -float(given.student_logits[row].log_softmax(-1)[token])
        assert float(found[row]) == pytest.approx(own * 0.5 ** (row % heads + 1), rel=1e-5)


def test_the_loss_is_the_published_sum_over_heads() -> None:
    given = rows()
    given.tokens[3] = 0
    own = torch.nn.functional.cross_entropy(given.student_logits, given.tokens, reduction="none")
    per_head = own.view(-1, 3).mean(0)
    expected = sum(0.8 ** (head + 1) * per_head[head] for head in range(3))
    torch.testing.assert_close(3 * terms(given).mean(), expected)


def test_the_argmax_label_is_the_target_s() -> None:
    given = rows()
    own = torch.nn.functional.cross_entropy(
        given.student_logits, given.teacher_logits.argmax(-1), reduction="none"
    )
    torch.testing.assert_close(terms(given, label="argmax", decay=1.0), own)


def test_a_soft_label_is_met_by_the_target_s_distribution_alone() -> None:
    given = rows()
    assert (terms(given, label="soft") > 0).all()
    same = LabelledRows(
        None, given.teacher_logits + 3, *(getattr(given, n) for n in LabelledRows.__slots__[2:])
    )
    assert terms(same, label="soft").abs().max() < 1e-6


@pytest.mark.parametrize(("key", "value"), [("decay", 0.0), ("label", "best")])
def test_a_wrong_option_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"objective.{key}"):
        fields.options(MedusaObjectiveConfig, {key: value}, "objective")
