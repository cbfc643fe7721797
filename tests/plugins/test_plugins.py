from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import falcon_lab
from falcon_lab.config.load import load_experiment
from falcon_lab.errors import ConfigError, PluginWarning
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import Register
from falcon_lab.plugins.registry import Components
from installing import Site

GOOD = """
from dataclasses import dataclass
from falcon_lab import hookimpl

@dataclass
class HeadsConfig:
    heads: int = 3

@hookimpl
def register_components(register):
    register.drafter("{name}", "{module}_heavy:build", config=HeadsConfig)
"""

Install = Callable[..., None]


@pytest.fixture
def install(site: Site) -> Install:
    """Installs a module whose source has a ``{name}`` and its own ``{module}`` in it."""

    def make(distribution: str, source: str, *, version: str = "0.1", name: str = "x") -> None:
        text = source.format(name=name, module=distribution.replace("-", "_"))
        site.install(distribution, text, version=version)

    return make


def loaded() -> tuple[Components, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        components = load_components()
    messages = [str(w.message) for w in caught if w.category is PluginWarning]
    return components, messages


BUILT_IN = ["falcon-lab/falcon", "falcon-lab/saved", "falcon-lab/union"]


def names(components: Components, kind: str = "drafter") -> list[str]:
    return [c.full_name for c in components.components if c.kind == kind]


def test_an_installed_plug_in_is_found_beside_the_built_ins(install: Install) -> None:
    install("falcon-lab-heads", GOOD, version="2.0", name="heads")
    components, messages = loaded()
    assert names(components) == [*BUILT_IN, "falcon-lab-heads/heads"]
    assert components.provenance("drafter", {"name": "heads"}) == {
        "name": "heads",
        "distribution": "falcon-lab-heads",
        "version": "2.0",
    }
    assert components.check("drafter", {"name": "heads"}, "drafter")["heads"] == 3
    assert messages == []
    assert load_experiment(None, ["drafter.name=heads"]).drafter["heads"] == 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import does_not_exist", "ModuleNotFoundError: No module named 'does_not_exist'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "FalconLabError: it has no @hookimpl function register_components(register)"),
        (GOOD.replace("register_components", "register_componets"), "unknown hook"),
        (GOOD.replace("register)", "registre)"), "PluginValidationError"),
        (GOOD.replace("register.drafter", "register.draftr"), "has no attribute 'draftr'"),
        (GOOD + "    raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
        (GOOD.replace("config=HeadsConfig", "config=dict"), "config must be a dataclass"),
        (GOOD.replace("_heavy:build", "_heavy"), "build must be callable or 'module:name'"),
        (GOOD.replace('"{name}"', '"a/b"'), "drafter name 'a/b': use letters"),
    ],
)
def test_a_broken_plug_in_is_reported_and_the_others_work(
    install: Install, source: str, reason: str
) -> None:
    install("falcon-lab-broken", source, version="0.3.0")
    install("falcon-lab-heads", GOOD, name="heads")
    components, [message] = loaded()
    assert names(components) == [*BUILT_IN, "falcon-lab-heads/heads"]
    [failure] = components.failures
    assert (failure.distribution, failure.version) == ("falcon-lab-broken", "0.3.0")
    assert reason in failure.error
    assert message == str(failure)
    assert "\n" not in message


def test_a_broken_plug_in_matters_to_who_names_what_it_should_have_brought(
    install: Install,
) -> None:
    install("falcon-lab-broken", "import does_not_exist", version="0.3.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        assert load_experiment(None).drafter["name"] == "falcon"
        with pytest.raises(ConfigError) as caught:
            load_experiment(None, ["drafter.name=hydra"])
    said = str(caught.value)
    assert "no drafter named 'hydra'; known: falcon, saved, union; falcon-lab-broken 0.3.0" in said
    assert "did not load: Module" in said


def test_a_built_in_name_stays_the_built_ins_and_the_other_has_its_full_name(
    install: Install,
) -> None:
    install("falcon-lab-other", GOOD, name="falcon")
    install("falcon-lab-heads", GOOD, name="heads")
    components, [message] = loaded()
    assert "falcon-lab-other 0.1" in message
    assert "falcon-lab-other/falcon" in message
    assert "FALCON_LAB_PLUGINS=falcon-lab-heads leaves it out" in message
    for name in ("falcon", "falcon-lab/falcon"):
        experiment = load_experiment(None, [f"drafter.name={name}"], components=components)
        assert "block" in experiment.drafter
        assert components.provenance("drafter", experiment.drafter)["distribution"] == "falcon-lab"
    other = load_experiment(None, ["drafter.name=falcon-lab-other/falcon"], components=components)
    assert other.drafter == {"name": "falcon-lab-other/falcon", "heads": 3}


def test_a_name_of_two_plug_ins_is_nobodys_and_matters_to_who_uses_it(install: Install) -> None:
    install("falcon-lab-one", GOOD, name="x")
    install("falcon-lab-two", GOOD, name="x")
    components, messages = loaded()
    assert messages == []
    assert load_experiment(None, components=components).drafter["name"] == "falcon"
    with pytest.raises(ConfigError, match="write falcon-lab-one/x or falcon-lab-two/x"):
        load_experiment(None, ["drafter.name=x"], components=components)
    for name in ("falcon-lab-one/x", "falcon-lab-two/x"):
        experiment = load_experiment(None, [f"drafter.name={name}"], components=components)
        assert experiment.drafter["name"] == name


def test_the_allow_list_names_the_distributions_that_are_loaded(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("falcon-lab-one", GOOD, name="one")
    install("falcon-lab-two", GOOD, name="two")
    monkeypatch.setenv("FALCON_LAB_PLUGINS", " Falcon_Lab.Two ,")
    assert names(loaded()[0]) == [*BUILT_IN, "falcon-lab-two/two"]
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")
    assert names(loaded()[0]) == [*BUILT_IN]
    assert "falcon_lab_one" not in sys.modules
    monkeypatch.delenv("FALCON_LAB_PLUGINS")
    assert {"falcon-lab-one/one", "falcon-lab-two/two"} <= set(names(loaded()[0]))


def test_an_allowed_distribution_that_is_not_installed_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "falcon-lab-nowhere")
    components, [message] = loaded()
    assert message.startswith("falcon-lab-nowhere did not load: FALCON_LAB_PLUGINS names it")
    assert names(components) == [*BUILT_IN]


def test_of_two_entry_points_a_broken_one_and_a_name_taken_before_do_not_hide_the_rest(
    site: Site,
) -> None:
    source = GOOD.format(name="heads", module="falcon_lab_heads")
    points = "a = {module}\nb = falcon_lab_nowhere\nc = {module}"
    site.install("falcon-lab-heads", source, entry_points=points)
    components, messages = loaded()
    assert names(components) == [*BUILT_IN, "falcon-lab-heads/heads"]
    assert [failure.entry_point for failure in components.failures] == ["b", "c"]
    assert "No module named 'falcon_lab_nowhere'" in messages[0]
    assert "(entry point b)" in messages[0]
    assert "registers drafter 'heads' too" in messages[1]


@pytest.mark.parametrize("metadata", ["", "Metadata-Version: 2.1\n", "Name:\nVersion:\n"])
def test_a_distribution_without_a_name_goes_by_its_entry_points(site: Site, metadata: str) -> None:
    source = GOOD.format(name="heads", module="nameless")
    site.install("nameless", source, metadata=metadata)
    components, messages = loaded()
    assert names(components) == [*BUILT_IN, "nameless/heads"]
    assert messages == []


@pytest.mark.parametrize("points", ["no equals sign", "\udcff = x", "[[["])
def test_damaged_entry_points_of_one_distribution_hide_no_other(
    site: Site, install: Install, points: str
) -> None:
    install("falcon-lab-heads", GOOD, name="heads")
    site.install("damaged", "", entry_points="")
    damaged = site.folder / "damaged-0.1.dist-info" / "entry_points.txt"
    damaged.write_bytes(f"[falcon_lab]\n{points}\n".encode(errors="surrogateescape"))
    components, messages = loaded()
    assert names(components) == [*BUILT_IN, "falcon-lab-heads/heads"]
    assert any(message.startswith("damaged") for message in messages)


def test_a_distribution_that_calls_itself_ours_takes_no_name(site: Site) -> None:
    ours = "Metadata-Version: 2.1\nName: falcon-lab\nVersion: 9\n"
    source = GOOD.format(name="falcon", module="impostor")
    site.install("impostor", source, metadata=ours)
    site.allow("falcon-lab")
    components, messages = loaded()
    assert load_experiment(None, components=components).drafter["block"] == 2
    assert any("falcon-lab 9" in message for message in messages)


def test_a_plug_in_may_ask_for_the_components_while_it_registers_its_own(site: Site) -> None:
    asking = GOOD.replace(
        "def register_components(register):",
        (
            "def register_components(register):\n"
            "    from falcon_lab.plugins.discovery import load_components\n"
            "    assert load_components().knows('drafter', 'falcon')"
        ),
    )
    site.install("falcon-lab-heads", asking.format(name="heads", module="falcon_lab_heads"))
    components, messages = loaded()
    assert names(components) == [*BUILT_IN, "falcon-lab-heads/heads"]
    assert messages == []


def test_a_component_registered_twice_by_one_plug_in_is_an_error() -> None:
    registrar = Register("dist", "1")
    registrar.controller("x", lambda config, context: None)
    registrar.drafter("x", lambda config, context: None)
    with pytest.raises(ValueError, match="controller 'x' is registered twice"):
        registrar.controller("x", lambda config, context: None)


def with_sample(sample_wheel: Path, *arguments: str) -> str:
    """``falcon-lab`` with the sample distribution beside it: what it prints."""
    here = str(Path(falcon_lab.__file__).parents[1])
    environment = {**os.environ, "FALCON_LAB_PLUGINS": "falcon-lab-sample"}
    environment["PYTHONPATH"] = os.pathsep.join([str(sample_wheel), here])
    ran = subprocess.run(
        [sys.executable, "-m", "falcon_lab", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout


def test_a_wheel_with_three_components_shows_all_three(sample_wheel: Path) -> None:
    listing = json.loads(with_sample(sample_wheel, "plugins", "--json", "--strict"))
    brought = {
        (each["kind"], each["name"], each["version"])
        for each in listing["components"]
        if each["distribution"] == "falcon-lab-sample"
    }
    assert brought == {
        ("drafter", "sample-mlp", "0.3.0"),
        ("schedule", "sample-step", "0.3.0"),
        ("tree_builder", "sample-rake", "0.3.0"),
    }
    assert listing["failures"] == []


def test_a_yaml_may_name_all_three_components_of_a_wheel(
    sample_wheel: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "drafter: {name: sample-mlp, width: 1}\n"
        "glancing: {name: sample-step}\n"
        "tree: {name: falcon-lab-sample/sample-rake, depth: 2}\n"
    )
    resolved = with_sample(sample_wheel, "run", str(path), "--dry-run")
    assert "  name: sample-mlp\n  width: 1\n" in resolved
    assert "  name: sample-step\n  until: 0.5\n  ratio: 0.3\n" in resolved
    assert "  name: falcon-lab-sample/sample-rake\n  width: 2\n  depth: 2\n" in resolved
