from __future__ import annotations

from dflash_cases import FOLDER, KNOWN, drafter, engine, target

from falcon_lab import testing

OBJECTIVE = {"name": "falcon", "feature": 0.0, "soft": 1.0, "hard": 0.1, "slot_decay": 0.78}


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


def test_from_distillation_to_decoding() -> None:
    """A head that has learnt a target's own texts drafts most of them, and changes nothing."""
    model = target(vocab=16)
    head, texts = drafter(model, layers=1, anchors=12), testing.own_texts(model)
    parts = {"objective": OBJECTIVE, "schedule": {"name": "random"}, "components": KNOWN}
    _, after = testing.distil(testing.distillation(model, head, steps=130, lr=5e-3, **parts), texts)
    for place in (1, 2, 3):
        assert after[f"val/position_{place}/accuracy"] > 0.7
    for tree in ({"name": "chain", "depth": 3}, {"name": "optimal", "nodes": 8}):
        rounds = testing.lossless_rounds(engine(model, head, tree=tree), texts[:, :2].tolist(), 20)
        assert testing.accepted(rounds) / len(rounds) > 1.5, tree
