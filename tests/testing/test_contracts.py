"""Every component in this repository keeps the promises of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everything import everything
from falcon_lab import testing
from falcon_lab.testing.decoding import PROMPTS
from falcon_lab.testing.drafter_case import Case
from falcon_lab.testing.drafters import trees_for
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest

CHECKS: dict[str, Callable[..., None]] = {
    "target": testing.check_target,
    "tuner": testing.check_tuner,
    "engine": testing.check_engine,
    "drafter": testing.check_drafter,
    "schedule": testing.check_schedule,
    "tree_builder": testing.check_tree_builder,
    "acceptance_rule": testing.check_acceptance,
    "controller": testing.check_controller,
    "objective": testing.check_objective,
}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "tuner": [
        {"name": "sar_sft", "layout": "truncated"},
    ],
    "drafter": [
        {"name": "falcon", "block": 1, "fuse": "linear"},
        {"name": "falcon", "block": 3, "lstm_layers": 1, "layers": 2},
        {"name": "falcon", "block": 2, "query": "newest"},
        {"name": "falcon", "block": 3, "phase": "absolute"},
        {"name": "falcon", "block": 3, "fuse": "linear", "draft_vocabulary": 7},
        {"name": "eagle", "draft_vocabulary": 5},
        {"name": "eagle3", "head": "own"},
        {"name": "eagle3", "head": "own", "draft_vocabulary": 7},
        {"name": "medusa", "head": "own", "block": 2},
        {"name": "medusa", "head": "own", "block": 3, "draft_vocabulary": 7},
        {"name": "medusa", "head": "shared", "layers": 2, "draft_vocabulary": 7},
        {"name": "hydra", "layers": 2, "prefix": True, "head": "shared", "draft_vocabulary": 7},
        {"name": "dflash", "block": 1, "layers": 1},
        {"name": "dspark", "block": 3, "layers": 1, "rank": 4, "draft_vocabulary": 7},
        {"name": "dflash", "block": 4, "layers": 1, "draft_vocabulary": 7},
        {"name": "sps", "layers": 1, "draft_vocabulary": 7},
        {"name": "selfspec", "skip_attention": [0], "skip_mlp": [1]},
        {"name": "eesd", "draft_vocabulary": 7},
        {"name": "space", "mask_token": "<unk>", "block": 2},
        {"name": "diffusion", "block": 3, "attention": "bidirectional", "draft_vocabulary": 7},
        {"name": "union", "parts": [{"name": "lookahead", "ngram": 3}, {"name": "falcon"}]},
        {"name": "union", "parts": [{"name": "falcon", "block": 3}, {"name": "sps"}]},
    ],
    "schedule": [
        {"name": "csgd", "start": 0.45, "end": 0.1, "tokens": "data", "revealed_in_loss": False},
        {"name": "valid_prefix", "schedule": {"name": "csgd"}},
    ],
    "tree_builder": [
        {"name": "chain", "proposal": "sampled"},
        {"name": "static", "proposal": "sampled"},
        {"name": "static", "template": "k2-16-d4", "max_depth": 3},
        {"name": "dynamic", "nodes": 3, "beam": 1, "width": 2, "depth": 1},
    ],
    "controller": [
        {"name": "fixed", "depth": 2, "nodes": 3},
        {"name": "confidence", "threshold": 1.0},
        {"name": "draft_exit", "threshold": 0.3, "most": 2, "step": 0.2},
    ],
    "objective": [
        {"name": "falcon", "hard_label": "sampled"},
        {"name": "falcon", "soft_form": "tempered", "hard_label": "data"},
        {"name": "falcon", "feature": 0.0, "hard": 0.0},
        {"name": "falcon", "feature_form": "mse"},
        {"name": "falcon", "slot_decay": 0.8},
        {"name": "medusa", "label": "soft"},
        {"name": "mdlm", "label": "soft", "streak": 0.5},
    ],
}


INCOMPLETE = {
    "target": ("smollm2",),  # this repository has not its model
    "drafter": ("saved", "union", "space"),  # a folder, parts and a mask token are missing
    # Parts are missing, which test_planted_trees.py has; for one token a pass, which its tests say.
    "tree_builder": ("union", "gsd"),
}


def nodes(kind: str) -> list[dict[str, Any]]:
    """Every component of a kind with its defaults, and with options that matter."""
    known = everything()
    found = [{"name": name} for name in known.names(kind)] + VARIANTS.get(kind, [])
    for name in INCOMPLETE.get(kind, ()):
        found.remove({"name": name})
    if kind == "tree_builder":
        found += [{"name": "static", "template": name} for name in known.names("template")]
    return found


def label(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "parts" in value:
        return "-".join([value["name"], *(part["name"] for part in value["parts"])])
    return "-".join(str(part) for key, part in value.items() if part != "static" or key != "name")


@pytest.fixture(autouse=True)
def _all_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("falcon_lab.testing.tested.load_components", everything)


@pytest.mark.parametrize(
    ("kind", "node"), [(kind, node) for kind in CHECKS for node in nodes(kind)], ids=label
)
def test_every_component_passes_the_check_of_its_kind(kind: str, node: dict[str, Any]) -> None:
    CHECKS[kind](node)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
@pytest.mark.parametrize(
    "name", [name for name in everything().names("drafter") if name not in INCOMPLETE["drafter"]]
)
def test_every_drafter_is_lossless_on_other_families_too(name: str, family: str) -> None:
    tested = ComponentUnderTest("drafter", {"name": name})
    case = Case(tested, tiny_target(family, vocab=12, positions=48))
    for tree in trees_for(case).values():
        engine = case.engine(case.fresh(), tree=tree)
        testing.lossless_rounds(engine, PROMPTS[1:], 12)


def test_every_kind_has_a_check() -> None:
    files = {"template", "saved_drafter", "corpus"}  # checked by whoever reads them
    assert set(CHECKS) | files == {c.kind for c in everything().components}
