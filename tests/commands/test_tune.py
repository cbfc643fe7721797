"""``falcon-lab tune`` on tiny random models from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from falcon_lab.config.load import load_experiment
from falcon_lab.studies.tune import stage
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.trees.paths import checked
from running import EXPERIMENTS, refused, run
from saved_models import PROMPTS, save_models

OTHERS = ["xyz abc", "one two", "a.b.c"]
CHEAP = Costs(
    [(0, 1e-3), (6, 1.01e-3)], 1e-6, 1e-6, 1e-6, 1e-6, 1e-5, 1e-3, builders={"dynamic": 1e-6}
)
SMALL = ("--nodes=6", "--depth=4", "--max-new-tokens=36", "evaluation.repeats=1", PROMPTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_models(tmp_path_factory.mktemp("models"))
    lines = [json.dumps({"question_id": n, "turns": [t]}) for n, t in enumerate(OTHERS)]
    (folder / "others.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def _built_ins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")


@pytest.fixture(scope="module")
def tuned(models: Path) -> tuple[str, Path]:
    """What tuning printed, and the folder with its files."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_PLUGINS", "")
        # Where drafting is nearly free even a drafter that knows nothing gets a tree.
        patch.setattr(stage, "measure_costs", lambda *_: CHEAP)
        printed = run(
            *("tune", models / "drafter", "--prompts", models / "others.jsonl"),
            *("--tree=chain,depth=2", "--tree=dynamic,nodes=4", "--into", models / "tuned"),
            *("tree.name=static", "tree.template=['0', '1']", *SMALL),
        )
    return printed, models / "tuned"


@pytest.fixture
def results(tuned: tuple[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tuned[1] / "tune.json").read_text("utf-8"))
    return found


ROWS = ["chain depth=2", "dynamic nodes=4", "own", "tuned", "tuned dynamic"]


def test_every_tree_is_predicted_and_measured_and_writes_plain_decodings_tokens(
    results: dict[str, Any],
) -> None:
    assert list(results["methods"]) == ["plain", *ROWS]
    assert list(results["tune"]["predicted"]) == ROWS
    for name in ROWS:
        assert results["methods"][name]["identical_share"] == 1, name
        predicted = results["tune"]["predicted"][name]
        assert predicted["tau"] >= 1
        assert predicted["speedup"]["ratio"] > 0
    assert set(results["tune"]["over"]) == {"plain", *ROWS} - {results["tune"]["chosen"]}


def test_the_json_holds_costs_and_acceptance(results: dict[str, Any]) -> None:
    found = results["tune"]
    assert found["block"] == 2
    assert found["texts"]["count"] == len(OTHERS)
    assert found["costs"]["verify"] == [list(point) for point in CHEAP.verify]
    for table in found["acceptance"].values():
        assert table[0]["depth"] == 1
        for row in table:
            assert sum(row["ranks"]) + row["beyond"] == pytest.approx(1)
    for row in found["thresholds"]:
        checked(row["template"])
    template = results["experiment"]["evaluation"]["methods"]["tuned"]["tree"]["template"]
    assert 0 < len(checked(template)) <= 6
    assert 0 < found["predicted"]["tuned"]["nodes"] <= 6


def test_one_of_the_most_promising_trees_is_chosen(results: dict[str, Any]) -> None:
    found = results["tune"]
    assert {"tuned", "tuned dynamic"} < set(found["trial"]) <= set(ROWS)
    assert found["chosen"] in found["trial"]
    assert results["headline"] == found["chosen"]
    row = results["experiment"]["evaluation"]["methods"][found["chosen"]]
    assert found["tree"] == row["tree"]
    assert found["controller"] == (row["controller"] or results["experiment"]["controller"])


def test_the_tables_name_every_tree(tuned: tuple[str, Path]) -> None:
    printed, folder = tuned
    for name in ["plain", *ROWS]:
        assert any(line.startswith(f"{name} ") for line in printed.splitlines()), name
    for words in ("verify, ms", "later pass", "rank 0", "depth 1", "speed-up predicted"):
        assert words in printed
    assert "other prompts" in " ".join(printed.split())  # a note, wrapped
    assert str(folder / "tuned.yaml") in printed


def test_the_yaml_is_an_override_of_an_experiment(
    tuned: tuple[str, Path], results: dict[str, Any]
) -> None:
    file = tuned[1] / "tuned.yaml"
    assert set(yaml.safe_load(file.read_text("utf-8"))) == {"tree", "controller", "evaluation"}
    experiment = load_experiment(EXPERIMENTS / "csgd.yaml", [str(file)])
    assert experiment.evaluation.threads == results["hardware"]["threads"]
    assert experiment.tree == results["tune"]["tree"]
    assert experiment.controller == results["tune"]["controller"]


def test_the_yaml_is_a_tree_of_bench(models: Path, tuned: tuple[str, Path]) -> None:
    file, into = tuned[1] / "tuned.yaml", models / "bench.json"
    run(
        *("bench", "--drafter", models / "drafter", "--method=drafter", "--tree", file),
        *("--json", into, "--max-new-tokens=8", "evaluation.repeats=1", PROMPTS),
    )
    found = json.loads(into.read_text("utf-8"))
    assert found["methods"][str(file)]["identical_share"] == 1
    row = found["experiment"]["evaluation"]["methods"][str(file)]
    written = yaml.safe_load(file.read_text("utf-8"))
    assert all(row[key] == written[key] for key in ("tree", "controller"))


def test_the_plots_are_drawings(tuned: tuple[str, Path]) -> None:
    for name in ("costs", "acceptance", "speedups"):
        assert "<svg" in (tuned[1] / f"{name}.svg").read_text("utf-8")


def test_a_tree_is_not_tuned_on_the_prompts_that_it_is_measured_on(
    models: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared.jsonl"
    shared.write_text('{"question_id": "a", "turns": ["abc def"]}\n')
    line = refused("tune", models / "drafter", "--prompts", shared, *SMALL)
    assert "a is among the prompts that the trees are then measured on" in line


def test_texts_that_are_too_short_are_said_so(models: Path) -> None:
    short = [word for word in SMALL if not word.startswith("--max")]
    line = refused(
        *("tune", models / "drafter", "--prompts", models / "others.jsonl"),
        *("--max-new-tokens=12", *short),
    )
    assert "two texts of more than 16 tokens are needed" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a saved drafter's folder or name; --help shows how"),
        (["nowhere"], "nowhere: no saved drafter here (config.json is missing)"),
        (["DRAFTER", "--tree=chian"], "override 'tree.name=chian': tree.name: no"),
        (["DRAFTER", "--tree=gone.yaml"], "gone.yaml: no such file"),
        (["DRAFTER", "--tree=static,template=[0]", PROMPTS], "tree node 0 is not understood"),
        (["DRAFTER", "evaluation.repeat=2"], "override 'evaluation.repeat=2': evaluation.repeat"),
        (["DRAFTER", "--prompts=gone"], "evaluation.prompts.name is 'gone': no such file"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(
    models: Path, arguments: list[str], message: str
) -> None:
    given = [word.replace("DRAFTER", str(models / "drafter")) for word in arguments]
    assert refused("tune", *given).startswith(f"falcon-lab: {message}")
