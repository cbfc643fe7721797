"""Every recipe, shortened: from its YAML to its products; and what a second run does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from filelock import FileLock
from safetensors.torch import load_file

from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import PretrainingConfig
from falcon_lab.fields import resolve
from falcon_lab.history import read_history
from falcon_lab.studies.compare.loading import load_plan
from installing import install_in_place
from running import EXPERIMENTS, ROOT, SMOKE, invoke, products, refused, run, smoke

YAMLS = sorted(p for p in EXPERIMENTS.rglob("*.yaml") if "sweeps" not in p.parts)
COMPARISONS = [p for p in YAMLS if {"heads", "base"} & set(yaml.safe_load(p.read_text("utf-8")))]
RECIPES = [p for p in YAMLS if p not in COMPARISONS]
PACKAGED = ROOT / "src" / "falcon_lab" / "pretraining" / "recipes" / "tiny-code.yaml"
BUILT_IN = EXPERIMENTS / "targets" / "tiny-code.yaml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of the main job."""
    out = tmp_path_factory.mktemp("main") / "csgd"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        run(*main_job(out))
    return out


def main_job(out: Path, *more: str) -> list[str | Path]:
    return ["run", EXPERIMENTS / "csgd.yaml", *smoke(f"out={out}", *more)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.relative_to(EXPERIMENTS).as_posix())
def test_a_recipe_dry_runs_to_an_experiment_that_loads_as_itself(
    recipe: Path, tmp_path: Path
) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(run("run", recipe, "--dry-run"), encoding="utf-8")
    assert load_experiment(resolved) == load_experiment(recipe)


@pytest.mark.parametrize("recipe", COMPARISONS, ids=lambda p: p.relative_to(EXPERIMENTS).as_posix())
def test_a_comparison_dry_runs_to_its_plan(recipe: Path) -> None:
    printed = run("compare", recipe, "--dry-run")
    for head in load_plan(recipe).heads:
        assert re.search(rf"^{re.escape(head.name)} ", printed, re.MULTILINE)
    assert "trainings to do: " in printed


def test_a_comparison_that_is_run_says_what_it_is() -> None:
    message = refused("run", EXPERIMENTS / "compare.yaml")
    assert "heads: is a comparison's: falcon-lab compare" in message


def test_the_main_job_ends_with_its_products(finished: Path) -> None:
    results = products(finished, ["chain", "tree"])
    assert {"lookup", "k1"} <= {*results["methods"], *results["left_out"]}
    history = read_history(finished / "history.jsonl")
    assert any("val/accept_rate" in record for record in history)


@pytest.fixture
def _selfspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plug-in one that is installed."""
    install_in_place(ROOT / "plugins" / "falcon-lab-selfspec", tmp_path / "site", monkeypatch)


EXITS = [f"evaluation.methods.exit{layers}.drafter.layers=1" for layers in (10, 15, 20)]


@pytest.mark.usefixtures("_selfspec")
def test_a_target_drafts_for_itself_without_training(tmp_path: Path) -> None:
    recipe = EXPERIMENTS / "selfspec.yaml"
    job = ["run", recipe, *smoke(f"out={tmp_path / 'run'}", "data.corpus=generated", *EXITS)]
    wrong = "evaluation.methods.selfspec.drafter.skip_mlp=[99]"
    assert "skip_mlp: has layer 99" in refused(
        *job, wrong, "evaluation.methods.selfspec.optional=false"
    )
    run(*job)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert {"plain", "selfspec", "exit10", "exit20"} <= set(results["methods"])
    assert all(row["identical"] for row in results["rows"] if row["method"] != "plain")
    assert not (tmp_path / "run" / "drafter").exists()


def test_a_finished_drafter_is_trained_further_from_where_it_ended(
    finished: Path, tmp_path: Path
) -> None:
    start, out = f"distillation.start={finished / 'drafter'}", tmp_path / "further"
    stages = "stages=[target,data,distil]"
    run(*main_job(out, start, stages, "distillation.optimizer.lr=1e-9", "trainer.max_steps=2"))
    before, after = (load_file(f / "drafter" / "model.safetensors") for f in (finished, out))
    for name, weights in before.items():
        torch.testing.assert_close(after[name], weights, atol=1e-7, rtol=0)
    assert any(not torch.equal(after[name], weights) for name, weights in before.items())
    other = refused(*main_job(tmp_path / "other", start, stages, "drafter.layers=3"))
    assert "distillation.start" in other
    assert "drafter.layers is 3" in other
    assert not (tmp_path / "other").exists()


def test_hidden_states_are_carried_over_and_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(
        ROOT / "plugins" / "falcon-lab-hidden-transfer", tmp_path / "site", monkeypatch
    )
    folder = tmp_path / "run"
    job = smoke(f"out={folder}", "data.corpus=generated", "drafter.layer=1")
    run("run", EXPERIMENTS / "hidden-transfer.yaml", *job)
    results = products(folder, ["chain", "tree"])
    assert results["components"]["chain"]["drafter"]["name"] == "hidden_transfer"


def test_a_tuned_target_drafts_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_in_place(ROOT / "plugins" / "falcon-lab-space", tmp_path / "site", monkeypatch)
    small = {"mask_token": None, "max_steps": 3, "length": 32, "batch_size": 1, "positions": 8}
    short = {**small, "documents": 20, "validation": 2}
    tune = [f"target.tune.{key}={value}" for key, value in short.items()]
    job = smoke(f"out={tmp_path / 'run'}", "data.corpus=generated", *tune)
    run("run", EXPERIMENTS / "space.yaml", *job)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert {"one", "two", "three"} <= set(results["methods"])
    assert all(row["identical"] for row in results["rows"] if row["method"] != "plain")
    tuning = results["target"]["tuning"]
    assert tuning["parent"]["fingerprint"] != results["target"]["fingerprint"]
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert tuning["parent"]["fingerprint"] in report
    assert not (tmp_path / "run" / "drafter").exists()
    sets = [f"prompts.{name}.texts=[{name}]" for name in ("MT-Bench", "HumanEval", "GSM8K")]
    field = smoke(f"out={tmp_path / 'field'}", "data.corpus=generated", *tune, *sets)
    run("compare", EXPERIMENTS / "field-space.yaml", *field, "only=[space]", "temperatures=[0]")
    compared = json.loads((tmp_path / "field" / "field-space.json").read_text(encoding="utf-8"))
    assert compared["target"]["fingerprint"] == results["target"]["fingerprint"]
    assert [row["prompt_set"] for row in compared["rows"]] == ["MT-Bench", "HumanEval", "GSM8K"]


@pytest.mark.parametrize(
    ("name", "plugin"),
    [("fspad", "eagle"), ("hydra", "hydra"), ("chimera", "hydra"), ("dspark", "dflash")],
)
def test_a_head_for_a_real_model_ends_with_its_products(
    name: str, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(ROOT / "plugins" / f"falcon-lab-{plugin}", tmp_path / "site", monkeypatch)
    small = ["data.corpus=generated", "data.feature_store=null", "drafter.draft_vocabulary=null"]
    small += ["drafter.taps=[]"] if name == "dspark" else []
    run("run", EXPERIMENTS / f"{name}.yaml", *smoke(f"out={tmp_path / 'run'}", *small))
    products(tmp_path / "run", ["chain", "tree"])


def test_attentions_side_by_side_draft_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(ROOT / "plugins" / "falcon-lab-easyspec", tmp_path / "site", monkeypatch)
    late = "evaluation.methods.late4.drafter.groups=[[0,1]]"
    job = smoke(f"out={tmp_path / 'run'}", "data.corpus=generated", late)
    run("run", EXPERIMENTS / "easyspec.yaml", *job)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert {"plain", "groups2", "groups4", "groups7", "late4"} <= set(results["methods"])
    assert all(row["identical"] for row in results["rows"] if row["method"] != "plain")


@pytest.mark.parametrize(
    ("recipe", "methods"),
    [("diffusion", ["chain", "diffuspec", "paths"]), ("specdiff", ["chain", "deterministic"])],
)
def test_a_masked_model_drafts(
    recipe: str, methods: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(ROOT / "plugins" / "falcon-lab-diffusion", tmp_path / "site", monkeypatch)
    small = ["data.corpus=generated", "drafter.layers=1", "drafter.draft_vocabulary=null"]
    folder, greedy = tmp_path / "run", "evaluation.temperature=0"
    run("run", EXPERIMENTS / f"{recipe}.yaml", *smoke(f"out={folder}", greedy, *small))
    products(folder, methods)


def test_an_early_exit_ends_with_its_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(ROOT / "plugins" / "falcon-lab-eesd", tmp_path / "site", monkeypatch)
    small = ["data.corpus=generated", "drafter.layers=1", "drafter.draft_vocabulary=null"]
    small += [f"data.feature_store={tmp_path / 'store'}"]
    recipe, out = EXPERIMENTS / "eesd.yaml", tmp_path / "run"
    assert load_experiment(recipe).drafter["layers"] == 6
    run("run", recipe, *smoke(f"out={out}", *small))
    products(out, ["chain", "beta", "calibration"])


def test_trigrams_of_a_corpus_are_counted_once_and_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_in_place(ROOT / "plugins" / "falcon-lab-aded", tmp_path / "site", monkeypatch)
    from falcon_lab_aded.__main__ import main

    table, recipe = tmp_path / "trigrams.safetensors", EXPERIMENTS / "aded.yaml"
    job = ["run", recipe, *smoke(f"out={tmp_path / 'run'}", "data.corpus=generated")]
    job += [f"evaluation.methods.{row}.drafter.table={table}" for row in ("aded", "small", "fixed")]
    assert "trigrams.safetensors: cannot be read" in refused(
        *job, "evaluation.methods.aded.optional=false"
    )
    run(*job, "stages=[target]")
    [made] = Path(os.environ["FALCON_LAB_CACHE"]).glob("targets/smoke-code-*/quality.json")
    words = ["--documents", "8", "--target", str(made.parent), "--out", str(table)]
    assert CliRunner().invoke(main, ["build", "generated", *words]).exit_code == 0
    run(*job)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert {"plain", "aded", "small", "fixed", "adaptive"} <= set(results["methods"])
    assert all(row["identical"] for row in results["rows"] if row["method"] != "plain")


def test_a_draft_graph_over_a_small_model_ends_with_its_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sps", "gsd"):
        install_in_place(ROOT / "plugins" / f"falcon-lab-{name}", tmp_path / "site", monkeypatch)
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "falcon-lab-sps,falcon-lab-gsd")
    small = ["drafter.hidden=16", "drafter.heads=2", "drafter.draft_vocabulary=null"]
    job = smoke(f"out={tmp_path / 'run'}", "data.corpus=generated", *small)
    run("run", EXPERIMENTS / "gsd.yaml", *job)
    products(tmp_path / "run", ["merged", "one", "never", "small", "chain", "dynamic"])


def test_the_smoke_experiment_ends_with_its_products(tmp_path: Path) -> None:
    printed = run("run", SMOKE, f"out={tmp_path}", *smoke(target=False))
    products(tmp_path, ["chain", "tree"])
    for promised in ("report.html", str(tmp_path / "drafter"), "tok/s", "identical"):
        assert promised in printed


def test_the_ablation_puts_its_heads_side_by_side(tmp_path: Path) -> None:
    recipe = EXPERIMENTS / "ablation.yaml"
    printed = run("compare", recipe, *smoke(f"out={tmp_path}", "seeds=[0]"))
    results = json.loads((tmp_path / "ablation.json").read_text(encoding="utf-8"))
    assert {(row["head"], row["budget"]) for row in results["rows"]} == {
        (head, budget) for head in ("csgd", "none") for budget in ("chain-6", "own")
    }
    for head in ("csgd", "none"):
        assert (tmp_path / f"{head}-seed0" / "drafter" / "model.safetensors").exists()
        [training] = results["heads"][head]["trainings"]
        assert "val/position_2/accept_rate" in training["validation"]
        assert re.search(rf"^{head} +own ", printed, re.MULTILINE)


def test_the_field_is_measured_by_the_heads_that_were_trained_on_equal_terms(
    tmp_path: Path, finished: Path
) -> None:
    """``heads.yaml`` trains what ``field.yaml`` measures; what was not trained is left out."""
    heads, field = tmp_path / "heads", tmp_path / "field"
    taps = ["data.corpus=generated", "data.feature_store=null", "data.feature_store_taps=[]"]
    small = [*taps, "heads.falcon.drafter.draft_vocabulary=null", "only=[falcon]"]
    run("compare", EXPERIMENTS / "heads.yaml", *smoke(f"out={heads}", *small))
    trained = f"heads.falcon.runs=[{heads / 'falcon-seed0'}]"
    sets = [f"prompts.{name}.texts=[{name}]" for name in ("MT-Bench", "HumanEval", "GSM8K")]
    measured = ["data.corpus=generated", "only=[falcon,eesd]", trained, *sets]
    printed = run("compare", EXPERIMENTS / "field.yaml", *smoke(f"out={field}", *measured))
    assert "left out: eesd" in printed
    results = json.loads((field / "field.json").read_text(encoding="utf-8"))
    assert {(row["head"], row["prompt_set"], row["temperature"]) for row in results["rows"]} == {
        ("falcon", prompts, temperature)
        for prompts in ("MT-Bench", "HumanEval", "GSM8K")
        for temperature in (0, 1)
    }


def test_heads_are_not_trained_on_several_devices(tmp_path: Path) -> None:
    recipe = EXPERIMENTS / "ablation.yaml"
    message = refused("compare", recipe, *smoke(f"out={tmp_path}", "trainer.devices=2"))
    assert "trainer.devices is 2" in message


@pytest.mark.slow
def test_the_library_experiment_ends_with_its_products(tmp_path: Path) -> None:
    corpus = ["target.pretraining.corpus=stdlib", "target.name=small", "data.corpus=stdlib"]
    run("run", EXPERIMENTS / "stdlib.yaml", *smoke(*corpus, f"out={tmp_path}"))
    products(tmp_path, ["chain", "tree"])


def test_the_k1_drafter_is_measured_by_the_main_job(tmp_path: Path, finished: Path) -> None:
    run("run", EXPERIMENTS / "k1.yaml", *smoke(f"out={tmp_path}"))
    assert not (tmp_path / "results.json").exists()
    row = f"evaluation.methods.k1.drafter_path={tmp_path / 'drafter'}"
    run(*main_job(finished, row, "stages=[evaluate,report]"))
    results = products(finished, ["chain", "tree", "k1"])
    assert results["labels"]["k1"].startswith("falcon, k=1")


def test_the_built_in_targets_recipe_runs_by_itself(tmp_path: Path) -> None:
    printed = run("run", BUILT_IN, *smoke(f"out={tmp_path}"))
    assert "nats/token" in printed or "quality gate" in printed
    assert not (tmp_path / "drafter").exists()


def test_the_built_in_targets_recipe_is_the_packaged_one() -> None:
    shipped = yaml.safe_load(BUILT_IN.read_text(encoding="utf-8"))["target"]["pretraining"]
    packaged = yaml.safe_load(PACKAGED.read_text(encoding="utf-8"))
    assert shipped == packaged
    # Every value stands in the file, so that a changed default does not change the target.
    stated = dataclasses.asdict(resolve(PretrainingConfig, packaged))
    assert stated == packaged


def test_the_same_command_again_trains_nothing(finished: Path) -> None:
    weights = finished / "drafter" / "model.safetensors"
    before = (weights.read_bytes(), weights.stat().st_mtime_ns)
    steps = len((finished / "history.jsonl").read_text().splitlines())
    printed = run(*main_job(finished))
    assert "is trained already" in printed
    assert (weights.read_bytes(), weights.stat().st_mtime_ns) == before
    assert len((finished / "history.jsonl").read_text().splitlines()) == steps


@pytest.mark.parametrize("stages", ["[evaluate,report]", "[report]"])
def test_later_stages_use_the_drafter_that_is_there(finished: Path, stages: str) -> None:
    (finished / "report.html").unlink()
    printed = run(*main_job(finished, f"stages={stages}"))
    assert "distil" not in printed
    products(finished, ["chain", "tree"])


def test_a_saved_drafter_is_evaluated_by_its_folder(finished: Path, tmp_path: Path) -> None:
    run("evaluate", finished, f"out={tmp_path}", "evaluation.max_new_tokens=4")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drafter.block=3", "drafter.block=2, not 3"),
        ("seed=1", "seed=0, not 1"),
        ("target.pretraining.seed=5", "target.pretraining.seed=0, not 5"),
    ],
)
def test_a_folder_keeps_to_the_settings_that_trained_its_drafter(
    finished: Path, change: str, named: str
) -> None:
    message = refused(*main_job(finished, change))
    assert named in message
    assert "out=FOLDER" in message


def test_two_runs_at_once_in_one_folder_are_refused(finished: Path) -> None:
    with FileLock(finished / ".lock"):
        assert "another run is using this folder" in refused(*main_job(finished))


@pytest.mark.parametrize("section", ["distillation.optimizer.lr", "target.pretraining.lr"])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))
    often = ["distillation.checkpoint_every=1", "target.pretraining.checkpoint_every=1"]
    job = main_job(tmp_path / "run", *often, "trainer.gradient_clip_val=null")
    job += [f"{section}=100", f"{section.removesuffix('lr')}weight_decay=100"]  # weights explode
    message = refused(*job)
    assert "at step" in message
    assert section in message
    assert list(tmp_path.rglob("last.ckpt"))
    assert not (tmp_path / "run" / "drafter").exists()


def test_a_run_whose_target_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))
    job = ["run", SMOKE, f"out={tmp_path / 'run'}", *smoke("stages=[target]", target=False)]
    from falcon_lab.pretraining import training as making

    with monkeypatch.context() as patch:
        patch.setattr(making, "judged_quality", interrupted)
        assert invoke(*job).exit_code == 130
    [partial] = (tmp_path / "cache" / "targets").glob("*.partial")
    weights = (partial / "model.safetensors").read_bytes()
    run(*job)
    assert not partial.exists()
    assert partial.with_suffix("").joinpath("model.safetensors").read_bytes() == weights


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_truncated_quality_file_is_mended(tmp_path: Path) -> None:
    job = ["run", SMOKE, f"out={tmp_path}", *smoke("stages=[target]", target=False)]
    run(*job)
    [quality] = Path(os.environ["FALCON_LAB_CACHE"]).glob("targets/smoke-code-*/quality.json")
    whole = quality.read_text(encoding="utf-8")
    quality.write_text(whole[:20], encoding="utf-8")
    run(*job)
    assert quality.read_text(encoding="utf-8") == whole
