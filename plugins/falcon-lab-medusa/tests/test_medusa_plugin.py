from __future__ import annotations

from typing import Any

import pytest
from medusa_cases import FOLDER, KNOWN, drafter, engine, target

from falcon_lab import testing

TREES: list[dict[str, Any]] = [
    {"name": "chain", "depth": 3},
    {"name": "static", "template": "mc_sim_7b_63"},
]


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


@pytest.mark.parametrize(("head", "label"), [("own", "data"), ("shared", "soft")])
def test_from_distillation_to_decoding(head: str, label: str) -> None:
    """Heads that have learnt a target's own texts draft most of them, and change nothing."""
    model = target(vocab=16)
    heads, texts = drafter(model, stir=0, block=3, head=head, layers=2), testing.own_texts(model)
    objective = {"name": "medusa", "label": label}
    module = testing.distillation(
        model, heads, objective=objective, components=KNOWN, steps=120, lr=1e-2, noise=0.0
    )
    before, after = testing.distil(module, texts)
    assert after["val/loss"] < before["val/loss"]
    for place in (1, 2, 3):
        key = f"val/position_{place}/accuracy"
        assert after[key] > max(0.6, before[key])
    for tree in TREES:
        rounds = testing.lossless_rounds(engine(model, heads, tree=tree), texts[:, :2].tolist(), 20)
        assert testing.accepted(rounds) / len(rounds) > 1.0, tree
