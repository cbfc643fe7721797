from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everything import everything
from falcon_lab.config.load import load_experiment
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.measure import engines
from falcon_lab.measure.engines import Methods, Setup, label
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import Register
from falcon_lab.plugins.registry import Components
from saved_models import save_untrained
from tiny_models import tiny_target


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


@pytest.fixture(scope="module")
def components() -> Components:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_PLUGINS", "")
        return load_components()


@pytest.fixture(scope="module")
def saved(target: Any, components: Components, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    return save_untrained(folder, target, components, block=3)


def methods(
    target: Any, components: Components, trained: Path, *overrides: str, row: str = "tree"
) -> Methods:
    rows = [f"evaluation.methods.{row}.{override}" for override in overrides]
    experiment = load_experiment(None, ["tree.depth=5", *rows], components=components)
    return Setup(experiment, target, components).methods(trained)


def test_a_row_takes_what_it_leaves_out_from_the_experiment(
    target: Any, components: Components, saved: Path
) -> None:
    found = methods(target, components, saved, "optional=false")
    assert found.labels == {"tree": "falcon, k=3, chain depth 5"}
    assert found.engines["tree"].tree_builder.max_depth == 5
    assert found.left_out == {}


def test_a_rows_own_parts_win_and_are_told(
    target: Any, components: Components, saved: Path
) -> None:
    found = methods(target, components, saved, "tree.name=static", "acceptance.name=greedy")
    assert found.labels["tree"].startswith("falcon, k=3, static")
    brought = found.provenance["tree"]
    assert {kind: each["name"] for kind, each in brought.items()} == {
        "drafter": "falcon",
        "tree": "static",
        "acceptance": "greedy",
        "controller": "fixed",
    }
    assert all(each["distribution"] == "falcon-lab" for each in brought.values())


@pytest.mark.parametrize("asked", ["none", "drafter"])
def test_it_is_told_whether_a_drafter_is_compiled(
    asked: str, target: Any, components: Components, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "prepare", lambda engine: None)  # that would take a minute
    wanted = [f"decoding.compile={asked}", "evaluation.methods.tree.optional=false"]
    experiment = load_experiment(None, wanted, components=components)
    found = Setup(experiment, target, components).methods(saved)
    assert found.provenance["tree"]["drafter"]["compiled"] is (asked == "drafter")


def test_another_drafters_folder_can_be_named(
    target: Any, components: Components, saved: Path, tmp_path: Path
) -> None:
    found = methods(target, components, tmp_path, f"drafter_path={saved}")
    assert found.engines["tree"].drafter.block == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [(["drafter_path=nowhere"], "nowhere"), (["drafter.name=elsewhere"], "elsewhere")],
)
def test_what_is_missing_is_left_out_with_its_reason_where_the_row_is_optional(
    target: Any, components: Components, saved: Path, row: list[str], reason: str
) -> None:
    found = methods(target, components, saved, *row, "optional=true")
    assert found.engines == found.labels == found.provenance == {}
    assert reason in found.left_out["tree"]
    with pytest.raises(FalconLabError, match=reason):
        methods(target, components, saved, *row)


def test_a_label_names_drafter_block_and_tree() -> None:
    node = {"name": "falcon"}
    assert label(node, 2, {"name": "chain", "depth": 6}) == "falcon, k=2, chain depth 6"
    assert label(node, 2, {"name": "static", "template": "auto"}) == "falcon, k=2, static auto"
    own = {"name": "static", "template": [[0], [0, 0]]}
    assert label(node, 1, own) == "falcon, k=1, static own template"
    assert label(node, 1, {"name": "mine"}) == "falcon, k=1, mine"
    dynamic = {"name": "dynamic", "nodes": 10, "beam": 2, "depth": 8}
    assert label(node, 2, dynamic) == "falcon, k=2, dynamic 10 nodes depth 8"
    assert label(node, 2, {**dynamic, "depth": None}) == "falcon, k=2, dynamic 10 nodes"


def test_a_controller_is_named_where_it_decides_something() -> None:
    node, tree = {"name": "falcon"}, {"name": "chain", "depth": 6}
    sure = {"name": "confidence", "threshold": 0.2}
    assert label(node, 2, tree, sure) == "falcon, k=2, chain depth 6, confidence 0.2"
    assert label(node, 2, tree, {"name": "mine"}) == "falcon, k=2, chain depth 6, mine"
    assert label(node, 2, tree, {"name": "fixed"}) == "falcon, k=2, chain depth 6"


def test_an_engine_runs_as_the_section_decoding_says(
    target: Any, components: Components, saved: Path
) -> None:
    overrides = ["evaluation.methods.row.optional=false", "decoding.prefill_chunk=7"]
    experiment = load_experiment(None, overrides, components=components)
    engines = Setup(experiment, target, components).methods(saved).engines
    assert engines["row"].decoding.prefill_chunk == 7


def test_a_drafter_that_nobody_trained_is_labelled_and_told(
    target: Any, components: Components
) -> None:
    lines: list[str] = []
    experiment = load_experiment(
        None, ["evaluation.methods.fresh.drafter.name=falcon"], components=components
    )
    found = Setup(experiment, target, components, lines.append).methods()
    assert found.labels["fresh"].endswith("untrained")
    assert any("nobody trained" in line for line in lines)


def test_a_run_without_its_drafter_is_told_to_train_one(
    target: Any, components: Components, tmp_path: Path
) -> None:
    with pytest.raises(FalconLabError, match=f"{tmp_path}.*distil"):
        methods(target, components, tmp_path / "drafter", "optional=false")


UNION = (
    "drafter={name: union, parts: [{name: saved}, {name: falcon, block: 1}]}",
    "tree={name: union, nodes: 9, parts: [{name: chain}, {name: dynamic}]}",
)


def test_a_union_has_the_runs_own_drafter_for_a_part(
    target: Any, components: Components, saved: Path
) -> None:
    found = methods(target, components, saved, *UNION)
    own, fresh = found.engines["tree"].drafter.drafters
    alone = methods(target, components, saved, "optional=false").engines["tree"].drafter
    assert isinstance(own, torch.nn.Module)
    assert isinstance(alone, torch.nn.Module)
    for mine, theirs in zip(own.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (own.block, fresh.block) == (3, 1)
    assert found.labels["tree"] == "falcon and falcon, k=3, union 9 nodes, untrained"
    parts = found.provenance["tree"]["drafter"]["parts"]
    assert [part["name"] for part in parts] == ["falcon", "falcon"]


def test_a_saved_part_may_be_named_by_its_folder(
    target: Any, components: Components, saved: Path, tmp_path: Path
) -> None:
    part = f"{{name: saved, path: {saved}}}"
    named = f"drafter={{name: union, parts: [{part}, {part}]}}"
    found = methods(target, components, tmp_path, named, UNION[1])
    assert found.engines["tree"].drafter.pretrained
    assert found.labels["tree"] == "falcon and falcon, k=3, union 9 nodes"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((UNION[0],), "has a tree for each of them"),
        (("drafter={name: union}", UNION[1]), "0 parts; give it two or more"),
        (
            ("drafter={name: union, parts: [{name: saved}, {name: nothing}]}",),
            r"parts\[1\].name: no drafter named",
        ),
    ],
)
def test_a_union_that_cannot_be_made_is_refused_in_a_line(
    overrides: tuple[str, ...], said: str, target: Any, components: Components, saved: Path
) -> None:
    with pytest.raises(FalconLabError, match=said):
        methods(target, components, saved, *overrides)


def test_an_optional_union_is_left_out_where_a_part_is_not_installed(
    target: Any, components: Components, saved: Path
) -> None:
    parts = "drafter={name: union, parts: [{name: saved}, {name: nothing}]}"
    found = methods(target, components, saved, parts, UNION[1], "optional=true")
    assert "nothing" in found.left_out["tree"]


def test_without_a_run_there_is_no_drafter_of_its_own(target: Any, components: Components) -> None:
    with pytest.raises(FalconLabError, match="there is no run here"):
        components.build("drafter", {"name": "saved"}, BuildContext(target))


class Backwards(PlainEngine):
    """Plain decoding that says that it is lossy."""

    lossless = False


def with_engines(made: Any) -> Components:
    register = Register("others", "1")
    register.engine("backwards", lambda config, context: made(context))
    return Components([*everything().components, *register.components])


def test_a_method_may_have_an_engine_of_its_own(target: Any) -> None:
    known = with_engines(lambda context: Backwards(context.target, decoding=context.decoding))
    row = "evaluation.methods.back"
    experiment = load_experiment(None, [f"{row}.engine.name=backwards"], components=known)
    setup = Setup(experiment, target, known)
    found = setup.methods(None)
    assert list(found.all) == ["tree", "chain", "back"] or "back" in found.others
    assert found.labels["back"] == "backwards"
    assert found.provenance["back"]["engine"]["distribution"] == "others"
    measurement = setup.measure({"plain": setup.plain(), **found.others}, setup.prompts()[:2])
    assert measurement.lossless == {"plain": True, "back": False}
    found.leave_out_others()
    assert not found.others
    assert "evaluate" in found.left_out["back"]


def test_what_is_no_engine_is_refused_and_blamed(target: Any) -> None:
    known = with_engines(lambda context: "nothing")
    row = "evaluation.methods.back"
    experiment = load_experiment(None, [f"{row}.engine.name=backwards"], components=known)
    with pytest.raises(FalconLabError, match="others 1 is a str"):
        Setup(experiment, target, known).methods(None)


def test_an_engine_has_no_drafter_beside_it() -> None:
    known = with_engines(lambda context: None)
    row = "evaluation.methods.back"
    given = [f"{row}.engine.name=backwards", f"{row}.tree.name=chain"]
    with pytest.raises(ConfigError, match=f"{row}.tree"):
        load_experiment(None, given, components=known)
