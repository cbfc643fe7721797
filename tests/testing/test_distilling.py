"""A drafter learns a tiny target's own texts."""

from __future__ import annotations

import torch

from falcon_lab.testing import (
    accepted,
    build_drafter,
    distil,
    distillation,
    engine,
    lossless_rounds,
    own_texts,
    plain_text,
    tiny_target,
)


def test_the_texts_are_the_targets_own() -> None:
    target = tiny_target(vocab=16)
    texts = own_texts(target, 3, 9)
    assert texts[:, 0].tolist() == [0, 1, 2]
    for row in texts.tolist():
        assert row[1:] == plain_text(target, row[:1], 8)


def test_a_drafter_that_is_distilled_drafts_more_of_them() -> None:
    target = tiny_target(vocab=16)
    drafter, texts = build_drafter(target, {"name": "falcon", "block": 2}), own_texts(target)
    prompts = [row[:2] for row in texts.tolist()]
    before = accepted(lossless_rounds(engine(target, drafter), prompts, 16))
    module = distillation(target, drafter, schedule={"name": "csgd"}, steps=60, noise=0.0)
    first, last = distil(module, texts)
    assert last["val/loss"] < first["val/loss"] / 2
    assert last["val/position_1/accuracy"] > first["val/position_1/accuracy"]
    assert not drafter.training
    assert accepted(lossless_rounds(engine(target, drafter), prompts, 16)) > 2 * before
    assert all(weight.grad is None for weight in target.model.parameters())


def test_two_trainings_with_one_seed_are_one() -> None:
    target, texts = tiny_target(vocab=16), torch.arange(12).view(1, 12)
    losses = []
    for seed in (3, 3, 4):
        drafter = build_drafter(target, {"name": "falcon", "block": 2})
        losses.append(distil(distillation(target, drafter, steps=2, seed=seed), texts)[1])
    assert losses[0] == losses[1] != losses[2]
