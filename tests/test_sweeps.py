"""The shipped sweep, expanded by W&B's own agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import running
from falcon_lab.config.load import load_experiment
from falcon_lab.measure.results import build_results
from falcon_lab.report.tracking import decode_metrics
from falcon_lab.run import run_folder
from measuring import EXPERIMENT, HEADER, TARGET, measurement

ROOT = Path(__file__).parents[1]
SWEEP = ROOT / "experiments" / "sweeps" / "csgd.yaml"
DISTRIBUTIONS = {
    "uniform": {"distribution", "min", "max"},
    "log_uniform_values": {"distribution", "min", "max"},
    None: {"values"},
}


@pytest.fixture
def sweep() -> dict[str, Any]:
    return dict(yaml.safe_load(SWEEP.read_text(encoding="utf-8")))


def extremes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings that between them use every value and every bound."""
    choices = [
        spec.get("values") or [spec["min"], (spec["min"] + spec["max"]) / 3, spec["max"]]
        for spec in parameters.values()
    ]
    return [
        {name: values[i % len(values)] for name, values in zip(parameters, choices, strict=True)}
        for i in range(max(map(len, choices)))
    ]


def expand(
    sweep: dict[str, Any],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    run: str = "run7",
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that W&B's agent would start a run with."""
    from wandb import wandb_agent

    started: list[tuple[list[str], dict[str, str]]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
            started.append((command, env))

    monkeypatch.setattr(wandb_agent, "AgentProcess", Process)
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # the agent sets them; put them back
        monkeypatch.setenv(name, "")
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep1")
    agent._sweep_command = list(sweep["command"])
    agent._command_run(
        {
            "run_id": run,
            "program": sweep["program"],
            "args": {name: {"value": value} for name, value in settings.items()},
        }
    )
    return started[0]


def test_the_sweep_has_the_form_that_wandb_asks_for(sweep: dict[str, Any]) -> None:
    assert set(sweep) == {"program", "name", "method", "metric", "parameters", "command"}
    assert sweep["method"] == "bayes"
    assert sweep["metric"]["goal"] in ("maximize", "minimize")
    assert (ROOT / sweep["program"]).exists()
    for name, spec in sweep["parameters"].items():
        assert set(spec) == DISTRIBUTIONS[spec.get("distribution")], name
        assert "min" not in spec or spec["min"] < spec["max"], name


def test_wandbs_schema_finds_no_violation(sweep: dict[str, Any]) -> None:
    from sweeps.config import schema_violations_from_proposed_config

    assert schema_violations_from_proposed_config(sweep) == []
    assert schema_violations_from_proposed_config({**sweep, "method": "guess"})


def test_the_sweeps_metric_is_one_that_a_run_logs(sweep: dict[str, Any]) -> None:
    found = build_results(measurement(2), experiment=EXPERIMENT, target=TARGET, header=HEADER)
    assert sweep["metric"]["name"] in decode_metrics(found)


def test_the_agents_command_line_is_ours_and_every_override_is_understood(
    sweep: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for settings in extremes(sweep["parameters"]):
        command, environment = expand(sweep, settings, monkeypatch, tmp_path)
        assert command[:4] == ["/usr/bin/env", "lightning", "run", "experiments/csgd.yaml"]
        experiment = load_experiment(ROOT / command[3], command[4:])
        for key, value in settings.items():
            section, option = key.split(".")
            assert getattr(experiment, section)[option] == value
        assert run_folder(experiment, environment) == Path(f"{experiment.out}-run7")


@pytest.mark.parametrize(
    "macro",
    [
        "${args}",
        "${args_no_hyphens}",
        "${args_append_hydra}",
        "${args_override_hydra}",
        "${args_json_file}",
    ],
)
def test_all_styles_of_arguments_are_understood(
    sweep: dict[str, Any], macro: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweep["command"][-1] = macro
    settings = {
        "drafter.block": 3,
        "evaluation.hf_generate": False,
        "evaluation.threads": None,
        "wandb.tags": ["a", "b"],
        "tree": {"name": "chain", "depth": 5},
    }
    command, _ = expand(sweep, settings, monkeypatch, tmp_path)
    experiment = load_experiment(ROOT / command[3], command[4:])
    assert experiment.drafter["block"] == 3
    assert experiment.evaluation.hf_generate is False
    assert experiment.evaluation.threads is None
    assert experiment.wandb.tags == ["a", "b"]
    assert (experiment.tree["name"], experiment.tree["depth"]) == ("chain", 5)


def test_the_expanded_command_passes_the_command_lines_own_check(
    sweep: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from falcon_lab.cli import main

    settings = extremes(sweep["parameters"])[0]
    command, _ = expand(sweep, settings, monkeypatch, tmp_path)
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, [*command[2:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"block: {settings['drafter.block']}" in done.output


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_run_each_in_its_own_folder_and_log_the_metric(
    sweep: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import wandb

    for place in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    logged = written_down(monkeypatch)
    settings = extremes(sweep["parameters"])
    for number in (0, 1):
        command, environment = expand(
            sweep, settings[number], monkeypatch, tmp_path, run=f"run{number}"
        )
        for name in ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
            monkeypatch.setenv(name, environment[name])
        monkeypatch.setenv("WANDB_DIR", "")
        recipe = str(ROOT / command[3])
        wandb.teardown()  # as the agent: a run of its own settings
        running.run("run", recipe, *running.smoke("out=out"), *command[4:])
        folder = tmp_path / f"out-run{number}"
        results = running.products(folder, ["chain", "tree"])
        assert results["experiment"]["drafter"]["block"] == settings[number]["drafter.block"]
        assert sweep["metric"]["name"] in logged
        logged.clear()
        [record] = folder.glob("wandb/offline-run-*/*.wandb")
        assert f"run-run{number}" in record.name


def written_down(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fills with the names of everything that W&B's runs are given, which they get all the same."""
    from wandb.sdk.wandb_run import Run

    keys: set[str] = set()
    log = Run.log

    def spy(self: Run, data: dict[str, Any], *more: Any, **options: Any) -> None:
        keys.update(data)
        log(self, data, *more, **options)

    monkeypatch.setattr(Run, "log", spy)
    return keys


def test_every_template_of_the_sweep_exists(sweep: dict[str, Any]) -> None:
    from falcon_lab.trees.template_tree import StaticTree

    for template in sweep["parameters"]["tree.template"]["values"]:
        for block in sweep["parameters"]["drafter.block"]["values"]:
            for depth in sweep["parameters"]["tree.max_depth"]["values"]:
                build(StaticTree, template, block, depth)


def build(tree: Any, template: str, block: int, depth: int) -> None:
    from falcon_lab.interfaces import BuildContext
    from falcon_lab.plugins.builtins import StaticConfig

    host: Any = None
    config = StaticConfig(template=template, max_depth=depth)
    built = tree(config, BuildContext(host=host, block=block))
    assert 1 <= built.max_depth <= depth
