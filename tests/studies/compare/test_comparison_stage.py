"""A whole comparison on a tiny target: trained, measured, killed, gone on with."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from comparisons import save_recipe
from falcon_lab import experiment
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.files import read_lines
from falcon_lab.measure.engines import Setup
from falcon_lab.measure.journal import Journal
from falcon_lab.studies.compare.loading import load_plan
from running import ROOT, invoke, refused, run

HEADS = ["csgd", "linear", "lookup"]
ONE = ["budgets=[chain-2]", "temperatures=[0]", "only=[csgd,lookup]"]
"""Overrides for the smallest comparison."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_recipe(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="module")
def finished(recipe: Path) -> str:
    """What a comparison printed."""
    return run("compare", recipe)


@pytest.fixture
def results(recipe: Path, finished: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((recipe.parent / "out" / "tiny.json").read_text("utf-8"))
    return found


@pytest.mark.slow
def test_every_head_is_measured_at_every_budget_and_temperature(results: dict[str, Any]) -> None:
    rows = {(r["head"], r["budget"], r["temperature"]): r for r in results["rows"]}
    assert set(rows) == {
        (head, budget, temperature)
        for head in HEADS
        for budget in ("chain-2", "tree-4", "best")
        for temperature in (0.0, 1.0)
        if (head, budget) != ("linear", "chain-2")
    }
    assert rows["csgd", "tree-4", 0.0]["seeds"] == [0, 1]
    assert rows["lookup", "tree-4", 0.0]["seeds"] == [0]
    for row in rows.values():
        assert row["lossless"]
        assert row["identical_share"] == (1 if row["temperature"] == 0 else None)
        assert row["speedup"]["ratio"] > 0


def test_nobody_verifies_more_than_the_budget(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        if row["budget"] != "best" and row["nodes_per_round"] is not None:
            assert row["nodes_per_round"] <= int(row["budget"].partition("-")[2])


def test_a_head_that_does_not_fit_a_budget_takes_no_part_there_and_that_is_said(
    results: dict[str, Any],
) -> None:
    assert "linear chain-2" in results["left_out"]  # it would spend 3
    assert set(results["heads"]["linear"]["best"]["0"]["tokens_per_second"]) == {"own"}


def test_a_head_spends_a_budget_as_it_says(results: dict[str, Any]) -> None:
    assert results["heads"]["lookup"]["budgets"] == {
        "chain-2": "lookup, k=10, chain depth 2",
        "tree-4": "lookup, k=3, chain depth 3",
    }


def test_best_is_the_fastest_of_the_grid_on_other_prompts(results: dict[str, Any]) -> None:
    rows = {(r["head"], r["budget"], r["temperature"]): r for r in results["rows"]}
    for name in HEADS:
        for temperature, best in results["heads"][name]["best"].items():
            rates = best["tokens_per_second"]
            assert set(rates) <= {"own", "chain-2"}
            assert best["budget"] == max(rates, key=lambda word: rates[word])
            if best["budget"] == "chain-2":  # which was measured once, and not twice
                at = float(temperature)
                same = rows[name, "chain-2", at], rows[name, "best", at]
                assert same[0]["speedup"] == same[1]["speedup"]


def test_heads_are_told_with_their_trainings(results: dict[str, Any]) -> None:
    linear = results["heads"]["linear"]
    assert linear["block"] == 1
    assert linear["parameters"] > 1000
    assert [t["seed"] for t in linear["trainings"]] == [0, 1]
    assert {t["tokens"] for t in linear["trainings"]} == {3 * 2 * 64}
    assert all(t["seconds"] > 0 for t in linear["trainings"])
    assert results["heads"]["lookup"]["parameters"] == 0
    assert results["heads"]["lookup"]["trainings"] == []
    assert linear["components"]["drafter"]["name"] == "falcon"
    assert "gone" in results["left_out"]


def test_each_training_is_an_ordinary_run(recipe: Path, finished: str) -> None:
    for name in ("csgd-seed0", "csgd-seed1", "linear-seed0", "linear-seed1"):
        folder = recipe.parent / "out" / name
        for product in ("experiment.yaml", "training.json", "history.jsonl", "drafter/config.json"):
            assert (folder / product).exists(), product
    assert not (recipe.parent / "out" / "lookup-seed0").exists()


def test_what_was_left_out_and_where_the_report_is_are_said(recipe: Path, finished: str) -> None:
    assert "left out: gone (no drafter named 'gone' is installed)" in finished
    assert str(recipe.parent / "out" / "tiny.html") in finished
    assert "<svg" in (recipe.parent / "out" / "tiny.html").read_text("utf-8")


def test_the_schema_tells_every_key_and_no_other(recipe: Path, results: dict[str, Any]) -> None:
    document = (ROOT / "docs" / "comparison-schema.md").read_text("utf-8")
    told = set(re.findall(r"^\| `([^`]+)` \|", document, re.MULTILINE))
    general = (ROOT / "docs" / "results-schema.md").read_text("utf-8")
    shared = set(re.findall(r"^\| `methods\.<method>\.(\w+)` \|", general, re.MULTILINE))
    found = {"paper.source", "paper.temperature", "paper.notes"}
    found |= {f"paper.metrics[].{key}" for key in ("metric", "rows", "pairs", "verdict")}
    for key, value in results.items():
        if key == "heads":
            found |= {f"heads.<head>.{inner}" for inner in value["csgd"]}
        elif key == "protocol":
            found |= {f"protocol.{inner}" for inner in value}
        elif key in ("rows", "pairs"):
            found |= {
                f"{key}[].{inner}" for inner in value[0] if key == "pairs" or inner not in shared
            }
        else:
            found.add(f"{key}[]" if key == "plain" else key)
    assert told == found | {"rows[]", "rows[].speedup"}
    assert set(results["plain"][0]) <= shared | {"temperature", "prompt_set"}


def test_plain_decoding_takes_a_turn_for_every_head(results: dict[str, Any]) -> None:
    assert results["protocol"]["baselines"] == 3
    journal = read_lines(Path(results["protocol"]["rows"]["heldout"]["0"]))
    answers = [line for line in journal if "turns" in line]
    methods = [r["method"] for r in answers if r["prompt"] == answers[0]["prompt"]]
    assert [m for m in methods if m.startswith("plain")] == [
        "plain",
        *(f"plain {n}" for n in (2, 3)),
    ]
    assert methods.index("plain 2") > methods.index("csgd tree-4 seed 1")


def test_the_same_command_again_trains_and_decodes_nothing(
    recipe: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run", never)
    monkeypatch.setattr(Journal, "add", never)
    monkeypatch.setattr(Setup, "drafter", never)  # nor is any head loaded or tried
    monkeypatch.setattr(Setup, "rehearse", never)
    printed = run("compare", recipe)
    assert (
        f"answers are there from before: {results['protocol']['rows']['heldout']['0']}" in printed
    )
    again = json.loads((recipe.parent / "out" / "tiny.json").read_text("utf-8"))
    assert again["rows"] == results["rows"]
    assert again["pairs"] == results["pairs"]
    assert again["heads"] == results["heads"]
    assert again["left_out"] == results["left_out"]


def test_another_table_of_the_same_folder_takes_the_rows_that_are_there(
    recipe: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "add", never)
    for path in Path(results["protocol"]["rows"]["heldout"]["0"]).parent.iterdir():
        begin, *lines = path.read_text("utf-8").splitlines(keepends=True)
        rest = [line for line in lines if '"facts"' not in line]  # as an earlier version wrote it
        path.write_text("".join([begin, *rest]), encoding="utf-8")
    other = recipe.with_name("other.yaml")
    other.write_text(
        "base: tiny.yaml\nname: other\n"
        "paper: {source: A paper, published: {tau: {x: {csgd: 3, linear tree-4: 2}}}}\n"
    )
    assert "A paper, beside ours" in run("compare", other)
    found = json.loads((recipe.parent / "out" / "other.json").read_text("utf-8"))
    assert found["rows"] == results["rows"]
    [metric] = found["paper"]["metrics"]
    rows = {(r["head"], r["budget"], r["temperature"]): r for r in results["rows"]}
    assert [r["ours"]["ratio"] for r in metric["rows"]] == [
        pytest.approx(rows["csgd", "best", 0.0]["tau"]),
        pytest.approx(rows["linear", "tree-4", 0.0]["tau"]),
    ]
    [pair] = metric["pairs"]
    assert pair["above"] == "csgd"


def test_other_settings_of_a_head_are_refused_where_one_is_trained(
    recipe: Path, finished: str
) -> None:
    message = refused("compare", recipe, "heads.csgd.drafter.block=3")
    assert "csgd-seed0: its drafter was trained with drafter.block=2, not 3" in message


def test_runs_are_compared_without_a_yaml(recipe: Path, finished: str, tmp_path: Path) -> None:
    runs = [
        recipe.parent / "out" / f"{name}-seed{n}" for name in ("csgd", "linear") for n in (0, 1)
    ]
    out = tmp_path / "given"
    printed = run("compare", *runs, "budgets=[chain-2]", "temperatures=[0]", f"out={out}")
    found = json.loads((out / "compare.json").read_text("utf-8"))
    assert [(r["head"], r["seeds"]) for r in found["rows"]] == [
        ("csgd", [0, 1]),
        ("linear", [0, 1]),
    ]
    assert "csgd" in printed


def test_heads_of_finished_runs_are_measured_on_several_prompt_sets(
    recipe: Path, finished: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run", never)
    out = recipe.parent / "out"
    path = recipe.with_name("field.yaml")
    path.write_text(
        "base: tiny.yaml\nname: field\nbudgets: [own]\ntemperatures: [0]\n"
        "prompts: {held: {limit: 1, prompt_tokens: 12}, own: {texts: [def add]}}\n"
        "only: [trained, shallow, both, lost]\n"
        "heads:\n"
        f"  trained: {{runs: [{out}/csgd-seed0, {out}/csgd-seed1]}}\n"
        "  shallow: {drafters_of: trained, tree: {name: chain, depth: 1}}\n"
        "  both:\n"
        "    train: false\n"
        "    drafter:\n"
        "      name: union\n"
        f"      parts: [{{name: saved, path: {out}/csgd-seed1/drafter}}, {{name: lookup}}]\n"
        "    tree: {name: union, nodes: 4, parts: [{name: chain, depth: 2}, {name: chain}]}\n"
        f"  lost: {{optional: true, runs: [{out}/gone]}}\n"
    )
    answers = counted(monkeypatch, SpeculativeEngine, "generate")
    assert f"left out: lost ({out}/gone/drafter holds no trained drafter)" in run("compare", path)
    # Five engines are tried and warmed up once, answer two sets, and the first seeds' show memory.
    assert len(answers) == 5 + 5 + 2 * 5 + 3
    found = json.loads((out / "field.json").read_text("utf-8"))
    assert {(r["head"], r["prompt_set"], len(r["seeds"]), r["prompts"]) for r in found["rows"]} == {
        (head, prompts, seeds, 1)
        for head, seeds in (("trained", 2), ("shallow", 2), ("both", 1))
        for prompts in ("held", "own")
    }
    assert all(row["identical_share"] == 1 for row in found["rows"])
    assert {t["tokens"] for t in found["heads"]["trained"]["trainings"]} == {3 * 2 * 64}
    assert found["heads"]["shallow"]["budgets"] == {"own": "falcon, k=2, chain depth 1"}
    assert found["protocol"]["prompts"] == {"held": 1, "own": 1}
    [begin, *_] = read_lines(Path(found["protocol"]["rows"]["own"]["0"]))
    weights = {name: each["weights"] for name, each in begin["facts"]["engines"].items()}
    assert weights["both own seed 0"] == weights["trained own seed 1"] != ""


def test_runs_of_two_targets_are_not_compared(recipe: Path, finished: str, tmp_path: Path) -> None:
    run_folder = recipe.parent / "out" / "csgd-seed0"
    other = tmp_path / "other"
    (other / "drafter").mkdir(parents=True)
    (other / "experiment.yaml").write_text((run_folder / "experiment.yaml").read_text())
    saved = json.loads((run_folder / "drafter" / "config.json").read_text())
    saved["target"]["fingerprint"] = "0123"
    (other / "drafter" / "config.json").write_text(json.dumps(saved))
    message = refused("compare", run_folder, other)
    assert f"{other / 'drafter'} for 0123: drafters are compared on one target" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a comparison's YAML, or runs"),
        (["nowhere"], "nowhere: no run's folder (experiment.yaml is missing)"),
        (["gone.yaml"], "gone.yaml: no such file"),
        (["RUN", "RUN"], "are both csgd with seed 0"),
        (["RUN", "budgets=[tree]"], "override 'budgets=[tree]': budgets[0]: no budget 'tree'"),
        (["RUN", "evaluation.repeat=1"], "override 'evaluation.repeat=1': evaluation.repeat"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    words: list[str], message: str, recipe: Path, finished: str
) -> None:
    folder = str(recipe.parent / "out" / "csgd-seed0")
    assert message in refused("compare", *(word.replace("RUN", folder) for word in words))


# --- killed and gone on with ---------------------------------------------------------------------


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("this was done already")


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Have a method note its calls."""
    calls, method = list[str](), getattr(owner, name)

    def noting(*arguments: Any, **more: Any) -> Any:
        calls.append(name)
        return method(*arguments, **more)

    monkeypatch.setattr(owner, name, noting)
    return calls


def test_a_comparison_killed_between_two_trainings_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = save_recipe(tmp_path)
    train, trained = experiment.run, []

    def once(run: Any, **more: Any) -> Any:
        if trained:
            signal.raise_signal(signal.SIGINT)
        trained.append(run.out)
        return train(run, **more)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "run", once)
        done = invoke("compare", recipe, *ONE)
    assert done.exit_code == 130
    assert "goes on where it stopped" in done.stderr
    assert [seed for _, seed in load_plan(recipe, ONE).pending] == [1]
    weights = tmp_path / "out" / "csgd-seed0" / "drafter" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert "== csgd, seed 1 (1 to train)" in run("compare", recipe, *ONE)
    assert weights.stat().st_mtime_ns == before


def test_a_comparison_killed_while_it_measures_goes_on_with_the_prompt_that_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = save_recipe(tmp_path)
    add, answers = Journal.add, []

    def some(journal: Any, *arguments: Any, **more: Any) -> Any:
        if len(answers) == 7:  # all five have answered the first prompt, two the second, then …
            signal.raise_signal(signal.SIGINT)
        answers.append(1)
        return add(journal, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", some)
        assert invoke("compare", recipe, *ONE).exit_code == 130
    [journal] = (tmp_path / "out" / "rows").glob("compare-*.jsonl")
    before = [record for record in read_lines(journal) if "turns" in record]
    assert before
    loads = counted(monkeypatch, Setup, "drafter")
    run("compare", recipe, *ONE)
    assert len(loads) == 3  # two seeds of one head, and the other head, once each
    after = [record for record in read_lines(journal) if "turns" in record]
    assert after[: len(before)] == before
    complete = {(r["prompt"], r["method"]) for r in after}
    assert len(complete) == 2 * 5  # two prompts, three engines and two turns of plain decoding
    results = json.loads((tmp_path / "out" / "tiny.json").read_text("utf-8"))
    assert {r["prompts"] for r in results["rows"]} == {2}


def test_two_comparisons_at_once_in_one_folder_are_refused(recipe: Path, finished: str) -> None:
    from falcon_lab.studies.compare.stage import holding

    with holding(recipe.parent / "out"):
        message = refused("compare", recipe)
    assert "another comparison is using this folder" in message
