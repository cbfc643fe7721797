from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import falcon_lab
from falcon_lab import cli
from falcon_lab.commands.arguments import announce, wants_color
from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError

YAML = "name: fast\ntree: {name: chain, depth: 6}\n"


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")
    Path("x.yaml").write_text(YAML)


def call(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), input=input)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """What ``run`` was asked to run, in place of running it."""
    import falcon_lab.experiment

    seen: list[Experiment] = []

    def run(experiment: Experiment, *, announce: Callable[[str], None]) -> None:
        announce("running")
        seen.append(experiment)

    monkeypatch.setattr(falcon_lab.experiment, "run", run)
    return seen


def raising(error: BaseException) -> Callable[..., None]:
    def body(*arguments: object, **options: object) -> None:
        raise error

    return body


def test_run_takes_overrides_in_both_styles_around_its_own_option(ran: list[Experiment]) -> None:
    result = call("run", "--data.length=64", "x.yaml", "--tree.depth=3", "seed=4")
    assert result.exit_code == 0, result.output
    assert result.output == "running\n"
    [experiment] = ran
    assert (experiment.data.length, experiment.tree["depth"], experiment.seed) == (64, 3, 4)


def test_overrides_in_both_styles_may_stand_before_the_file(ran: list[Experiment]) -> None:
    assert call("run", "tree.depth=3", "--seed=4", "x.yaml").exit_code == 0
    Path("lr=1").mkdir()
    Path("lr=1/x.yaml").write_text(YAML)
    assert call("run", "lr=1/x.yaml").exit_code == 0
    assert [each.tree["depth"] for each in ran] == [3, 6]
    heads = ["compare", "x.yaml", "heads={'a': {'tree': {'depth': 2}}, 'b': {}}", "--dry-run"]
    first, *rest = heads
    assert call(*heads).stdout == call(first, "seed=0", *rest).stdout != ""


def test_variants_and_seeds_are_a_comparison() -> None:
    described = call("run", "x.yaml", "variants={'a': ['tree.depth=2'], 'b': []}", "--dry-run")
    assert described.exit_code == 0, described.output
    compared = call(
        "compare", "x.yaml", "heads={'a': {'tree': {'depth': 2}}, 'b': {}}", "--dry-run"
    )
    assert described.stdout == compared.stdout
    repeated = call("run", "x.yaml", "seeds=[3, 4]", "--dry-run").stdout.splitlines()
    [head] = [line for line in repeated if line.startswith("fast ")]
    assert {"3", "4"} <= {*head.replace(",", " ").split()}


def test_a_dry_run_prints_what_loads_to_the_same_experiment(ran: list[Experiment]) -> None:
    result = call("run", "x.yaml", "tree.depth=3", "--dry-run")
    assert result.exit_code == 0
    assert ran == []
    Path("resolved.yaml").write_text(result.stdout)
    assert load_experiment("resolved.yaml") == load_experiment("x.yaml", ["tree.depth=3"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "x.yaml", "tree.dept=3"], "override 'tree.dept=3': tree.dept: unknown key"),
        (["run", "x.yaml", "tree.depth"], "override 'tree.depth': has no '='"),
        (
            ["run", "x.yaml", "variants={'a': ['x=1']}"],
            "override \"variants={'a': ['x=1']}\": variants.a.x: unknown key",
        ),
        (["run", "y.yaml"], "y.yaml: no such file"),
        (["run", "--seed=3"], "name an experiment's YAML; --help shows how"),
        (["evaluate", "nowhere"], "nowhere: no such file or folder"),
        (["evaluate", "x.yaml", "--seed=x"], "override '--seed=x': seed: Value 'x'"),
        (["generate", "--prompt", " "], "the prompt is empty"),
        (["generate", "--drafter", "nowhere"], "nowhere: no saved drafter here"),
        (["generate", "--temperature", "-1"], "override 'evaluation.temperature=-1.0': evaluation"),
        (["check", "--tree", "chian"], "override 'tree.name=chian': tree.name: no tree_builder"),
        (["view-data", "x.yaml", "data.lenth=3"], "override 'data.lenth=3': data.lenth: unknown"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], message: str
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"falcon-lab: {message}")


def test_an_error_of_many_lines_is_shown_in_one(
    monkeypatch: pytest.MonkeyPatch, ran: list[Experiment]
) -> None:
    monkeypatch.setattr(falcon_lab.experiment, "run", raising(FalconLabError("one\n  two")))
    result = call("run", "x.yaml")
    assert (result.exit_code, result.stderr) == (2, "falcon-lab: one two\n")


@pytest.mark.parametrize(
    "words", [("--traceback", "run", "x.yaml"), ("run", "x.yaml", "--traceback")]
)
def test_traceback_shows_where_the_line_comes_from(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        try:
            raise PermissionError(13, "Permission denied", "runs/a")
        except OSError as error:
            raise FalconLabError("runs/a cannot be written") from error

    monkeypatch.setattr("falcon_lab.experiment.run", fail)
    result = call(*words)
    assert result.exit_code == 2
    assert "PermissionError" in result.stderr
    assert result.stderr.splitlines()[-1] == "falcon-lab: runs/a cannot be written"


def test_what_the_system_says_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(13, "Permission denied", "runs/a")
    monkeypatch.setattr("falcon_lab.experiment.run", raising(error))
    result = call("run", "x.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("falcon-lab: runs/a: cannot be written (Permission denied); ")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, ran: list[Experiment]) -> None:
    monkeypatch.setattr(falcon_lab.experiment, "run", raising(ZeroDivisionError()))
    assert isinstance(call("run", "x.yaml").exception, ZeroDivisionError)


def ended_by(number: int, *, swallowed: type[Exception] | None = None) -> Callable[..., None]:
    """A run that gets a signal, and a library in it that makes another error of what it sees."""

    def body(*arguments: object, **options: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as error:
            if swallowed is None:
                raise
            raise swallowed from error

    return body


def losing(number: int) -> Callable[..., None]:
    """A run in which a library loses what the signal raised, and that goes on for long."""

    def body(*arguments: object, **options: object) -> None:
        with suppress(BaseException):
            signal.raise_signal(number)
        time.sleep(60)

    return body


def test_a_signal_that_a_library_loses_ends_the_command_all_the_same(
    monkeypatch: pytest.MonkeyPatch, ran: list[Experiment]
) -> None:
    monkeypatch.setattr(falcon_lab.experiment, "run", losing(signal.SIGTERM))
    started = time.monotonic()
    assert call("run", "x.yaml").exit_code == 143
    assert time.monotonic() - started < 30


def test_a_signal_in_a_finaliser_ends_the_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, ran: list[Experiment]
) -> None:
    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def body(*arguments: object, **options: object) -> None:
        Finalised()  # Python drops what its finaliser raises, and says so
        time.sleep(60)

    monkeypatch.setattr(falcon_lab.experiment, "run", body)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # in place of pytest's
    result = call("run", "x.yaml")
    assert result.exit_code == 143
    assert "Exception ignored" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("swallowed", [None, RuntimeError])
def test_a_signal_is_named_with_the_way_to_go_on_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    ran: list[Experiment],
    name: str,
    swallowed: type[Exception] | None,
) -> None:
    number = getattr(signal, name)
    monkeypatch.setattr(falcon_lab.experiment, "run", ended_by(number, swallowed=swallowed))
    before = signal.getsignal(number)
    result = call("run", "x.yaml")
    assert result.exit_code == 128 + number
    assert result.stderr == (
        f"falcon-lab: ended by {name}; the same command goes on where it stopped\n"
    )
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so(
    monkeypatch: pytest.MonkeyPatch, ran: list[Experiment]
) -> None:
    monkeypatch.setattr(falcon_lab.experiment, "run", ended_by(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert call("run", "x.yaml").exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_exit_code_of_the_command_is_kept(
    monkeypatch: pytest.MonkeyPatch, ran: list[Experiment]
) -> None:
    monkeypatch.setattr(falcon_lab.experiment, "run", raising(SystemExit(3)))
    assert call("run", "x.yaml").exit_code == 3


def test_evaluate_of_a_yaml_runs_the_last_two_stages_unless_told_otherwise(
    ran: list[Experiment],
) -> None:
    call("evaluate", "x.yaml", "tree.depth=2")
    call("evaluate", "x.yaml", "stages=[evaluate]")
    assert [experiment.stages for experiment in ran] == [["evaluate", "report"], ["evaluate"]]
    assert ran[0].tree["depth"] == 2


def test_evaluate_of_a_folder_measures_what_is_in_it(ran: list[Experiment]) -> None:
    Path("drafter").mkdir()
    described = {
        "format": 1,
        "drafter": {"name": "falcon"},
        "provenance": {"name": "falcon", "distribution": "falcon-lab"},
        "target": {"name": "org/model", "fingerprint": "0"},
    }
    Path("drafter/config.json").write_text(json.dumps(described))
    assert call("evaluate", "drafter", "--tree.depth=2").exit_code == 0
    [experiment] = ran
    assert (experiment.target.name, experiment.tree["depth"]) == ("org/model", 2)
    assert experiment.stages == ["evaluate", "report"]


def test_evaluate_of_a_comparison_names_its_command(ran: list[Experiment]) -> None:
    result = call("evaluate", "x.yaml", "seeds=[0, 1]")
    assert (result.exit_code, ran) == (2, [])
    assert "falcon-lab compare x.yaml" in result.stderr


def test_plugins_are_a_table_for_people() -> None:
    lines = call("plugins").stdout.splitlines()
    [falcon] = [line for line in lines if line.split()[:2] == ["drafter", "falcon"]]
    assert falcon.split()[2:4] == ["falcon-lab", falcon_lab.__version__]
    assert "block=2" in " ".join(lines)
    assert max(map(len, lines)) <= 100


def test_plugins_lists_json_for_programs_and_strict_fails_on_a_broken_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = call("plugins", "--json", "--strict")
    assert result.exit_code == 0
    listing = json.loads(result.stdout)
    assert ("drafter", "falcon") in {(c["kind"], c["name"]) for c in listing["components"]}
    assert listing["failures"] == []
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "falcon-lab-nowhere")
    assert "falcon-lab-nowhere did not load" in call("plugins").stdout
    broken = call("plugins", "--json")
    assert broken.exit_code == 0
    assert broken.stderr.startswith("falcon-lab: warning: falcon-lab-nowhere did not load")
    assert json.loads(broken.stdout)["failures"][0]["distribution"] == "falcon-lab-nowhere"
    assert call("plugins", "--strict").exit_code == 1


def test_doctor_prints_a_line_for_each_finding() -> None:
    result = call("doctor")
    mendable = [line for line in result.stdout.splitlines() if line.startswith("!")]
    assert result.exit_code == (3 if mendable else 0)
    assert any(line.split()[:1] == ["torch"] for line in result.stdout.splitlines())


def test_every_command_explains_itself() -> None:
    commands = {"run", "evaluate", "generate", "check", "plugins", "doctor", "view-data"}
    assert commands <= set(cli.main.commands)
    for name, command in cli.main.commands.items():
        assert command.help, name
        options = [each for each in command.params if isinstance(each, click.Option)]
        assert [each.opts for each in options if not each.help] == []
        assert call(name, "--help").exit_code == 0
    assert call("--help").exit_code == 0
    assert call("--version").stdout == f"falcon-lab, version {falcon_lab.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", ""], "an argument of run"),
        (["run", "x.yaml", ""], "an argument of run"),
        (["compare", "", "x.yaml"], "an argument of compare"),
        (["generate", "--drafter", ""], "--drafter"),
        (["generate", "--target="], "--target"),
        (["bench", "--json", ""], "--json"),
        ([""], "an argument of falcon-lab"),
    ],
)
def test_what_an_empty_variable_leaves_is_refused_and_not_guessed(
    arguments: list[str], named: str
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_override_may_be_empty_for_null(ran: list[Experiment]) -> None:
    assert call("run", "x.yaml", "wandb.entity=", "--wandb.group=").exit_code == 0
    assert [ran[0].wandb.entity, ran[0].wandb.group] == [None, None]


@pytest.mark.parametrize("command", ["run", "evaluate", "compare", "tune", "view-data"])
def test_the_shell_completes_files_and_folders(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_FALCON_LAB_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"falcon-lab {command} exp")
    monkeypatch.setenv("COMP_CWORD", "2")
    completed = CliRunner().invoke(cli.main, prog_name="falcon-lab")
    assert completed.stdout == "file,exp\n"


def test_a_prompt_that_is_no_text_is_named() -> None:
    no_text = CliRunner().invoke(cli.main, ["generate"], input=b"def \xff")
    assert no_text.exit_code == 2
    assert no_text.stderr.startswith("falcon-lab: standard input: byte 5 ")
    half = call("generate", "--prompt", "a\ud83d")
    assert half.exit_code == 2
    assert half.stderr.startswith("falcon-lab: --prompt: character 2 ")


def test_only_the_first_process_of_a_distributed_run_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce("first")
    monkeypatch.setenv("LOCAL_RANK", "1")
    announce("second")
    assert capsys.readouterr().out == "first\n"


def test_color_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert wants_color(False)
    assert not wants_color(True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(False)


def test_the_package_runs_as_a_module() -> None:
    root = Path(falcon_lab.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "falcon_lab", "--version"],
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert ran.stdout == f"falcon-lab, version {falcon_lab.__version__}\n", ran.stderr
