"""No plug-in is fatal to a run that does not use it, and each is named where it matters."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from click.testing import Result

import hostile_plug_ins as hostile
from falcon_lab.config.load import NODES, load_experiment
from falcon_lab.config.schema import TargetConfig
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.errors import FalconLabError, PluginWarning
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.loading import load_target
from falcon_lab.model.target import Target
from falcon_lab.plugins.discovery import load_components
from hostile_plug_ins import Hostile
from installing import Site
from running import invoke
from saved_models import save_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and an untrained drafter, made where no plug-in is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_PLUGINS", "")
        return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def target(models: Path) -> Target:
    return load_target(TargetConfig(name=str(models / "target"), device="cpu"))


YAML = "name: theirs\nout: {out}\ntarget: {{name: {target}}}\n"


@pytest.fixture
def recipe(models: Path) -> Path:
    """An experiment that uses nothing but what is built in."""
    path = models / "theirs.yaml"
    path.write_text(YAML.format(out=models / "out", target=models / "target"))
    return path


def put(site: Site, plug_in: Hostile) -> None:
    """Install it, and whatever it brings."""
    site.install(
        "hostile",
        plug_in.source,
        version="6.6",
        entry_points=plug_in.entry_points,
    )
    for name, source in plug_in.also.items():
        (site.folder / f"{name}.py").write_text(source, encoding="utf-8")


def ended(result: Result) -> int:
    """The exit code of a command that did not end in a traceback."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    return result.exit_code


def leaves_others_alone(recipe: Path, target: Target) -> tuple[str, list[str]]:
    """Run what does not use the plug-in: what is said on stderr, and what did not load."""
    listed, listing, strict = (
        invoke("plugins", *more) for more in ([], ["--json"], ["--json", "--strict"])
    )
    assert ended(listed) == ended(listing) == 0
    found = json.loads(listing.stdout)
    assert ("drafter", "falcon", "falcon-lab") in {
        (one["kind"], one["name"], one["distribution"]) for one in found["components"]
    }
    assert ended(strict) == (1 if found["failures"] else 0)
    assert json.loads(strict.stdout) == found
    assert ended(invoke("doctor")) in (0, 3)
    described = invoke("run", recipe, "--dry-run")
    assert ended(described) == 0
    assert described.stdout.startswith("name: theirs\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        load_drafter(recipe.parent / "drafter", target, load_components())
    return listed.stderr, [f"{one['distribution']}: {one['error']}" for one in found["failures"]]


def refusal(*command: str | Path) -> str:
    """What is said by a command that must end with 2: one to three lines."""
    done = invoke(*command)
    assert ended(done) == 2, done.output
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("falcon-lab: ") and len(line) < 1500 for line in lines)
    assert lines[-1].isprintable()
    return lines[-1]


def named(plug_ins: list[Hostile]) -> pytest.MarkDecorator:
    names = [plug_in.name.replace(" ", "-") for plug_in in plug_ins]
    return pytest.mark.parametrize("plug_in", plug_ins, ids=names)


@named(hostile.NEVER_LOADS)
def test_one_that_cannot_be_loaded_is_left_out_and_named(
    site: Site, recipe: Path, target: Target, plug_in: Hostile
) -> None:
    put(site, plug_in)
    heard, [failure] = leaves_others_alone(recipe, target)
    assert failure.startswith("hostile: ")
    assert plug_in.said in failure
    assert "hostile 6.6 did not load" in heard
    line = refusal("run", recipe, "--dry-run", "drafter.name=bad")
    assert "no drafter named 'bad'" in line
    assert plug_in.said in line


@named(hostile.UNUSABLE_OPTIONS)
def test_a_component_whose_options_cannot_be_made_is_listed_as_such_and_refused(
    site: Site, recipe: Path, target: Target, plug_in: Hostile
) -> None:
    put(site, plug_in)
    heard, [failure] = leaves_others_alone(recipe, target)
    assert failure.startswith("hostile: drafter 'bad': ")
    assert heard == ""
    line = refusal("run", recipe, "--dry-run", *plug_in.used)
    assert plug_in.said in line
    assert "hostile 6.6" in line


@named(hostile.WRONG_OPTIONS)
def test_what_the_options_raise_is_put_down_to_their_distribution(
    site: Site, recipe: Path, target: Target, plug_in: Hostile
) -> None:
    put(site, plug_in)
    leaves_others_alone(recipe, target)
    line = refusal("run", recipe, "--dry-run", *plug_in.used)
    assert plug_in.said in line
    assert "hostile 6.6" in line
    assert "drafter" in line


@named(hostile.WRONG_BUILDERS)
def test_what_a_builder_does_is_put_down_to_its_distribution(
    site: Site, recipe: Path, target: Target, plug_in: Hostile
) -> None:
    put(site, plug_in)
    assert leaves_others_alone(recipe, target) == ("", [])
    components = load_components()
    experiment = load_experiment(None, plug_in.used, components=components)
    key = plug_in.used[0].partition(".")[0]
    with pytest.raises(FalconLabError) as refused:
        components.build(NODES[key], getattr(experiment, key), BuildContext(target, block=1))
    assert plug_in.said in str(refused.value)
    assert "hostile" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_command_ends_with_2_where_a_builder_would_end_it_with_0(
    site: Site, models: Path
) -> None:
    put(site, next(one for one in hostile.WRONG_BUILDERS if one.name == "leaves while building"))
    line = refusal("generate", "--target", models / "target", "--prompt", "a", "drafter.name=bad")
    assert "hostile 6.6" in line
    assert "SystemExit: 0" in line


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(0)", "return 3", "return None"])
def test_a_target_that_a_plug_in_brings_is_put_down_to_it_as_well(site: Site, body: str) -> None:
    source = hostile.hook(
        "register.target('bad', build)", f"def build(config, context):\n    {body}\n"
    )
    put(site, Hostile("brings no target", source, ""))
    line = refusal("generate", "--target", "bad", "--prompt", "a")
    assert "target" in line
    assert "hostile 6.6" in line


@named(hostile.MEDDLES)
def test_what_is_not_a_plug_ins_to_change_is_put_back_and_said(
    site: Site, recipe: Path, target: Target, plug_in: Hostile
) -> None:
    put(site, plug_in)
    heard, failed = leaves_others_alone(recipe, target)
    assert failed == []
    [line] = heard.splitlines()
    assert line.startswith("falcon-lab: warning: hostile 6.6")
    assert plug_in.said in line


@named(hostile.TALKS)
def test_what_a_plug_in_prints_goes_to_stderr(
    site: Site, recipe: Path, target: Target, plug_in: Hostile
) -> None:
    put(site, plug_in)
    heard, failed = leaves_others_alone(recipe, target)
    assert failed == []
    assert plug_in.said in heard
