"""What a step makes of a batch, without a trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from distilling import batch, distillation
from falcon_lab.distillation.metrics import means


def test_features_can_be_saved_for_a_backward_pass() -> None:
    """Those of inference mode cannot."""
    module, given = distillation(), batch(3)
    features = module.lesson(given)._teach().features
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
    _, tally = module.lesson(given).learn(0.4)
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
    loss, tally = module.lesson(given).learn(0.4)
    assert len(passes) == 2
    assert not torch.equal(passes[0], passes[1])
    assert means(tally.reduced())["train/loss"] > 0
    assert loss.requires_grad
