from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import falcon_lab
from falcon_lab.config.load import NODES, dump, load_experiment, to_plain
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError

YAML = """\
name: fast
drafter: {name: falcon, block: 3}
tree:
  name: chain
  depth: 6
evaluation:
  methods:
    chain: {tree: {name: chain, depth: 4}}
    rival: {drafter: {name: not-installed, n: 3}, optional: true}
trainer: {max_steps: 10}
"""


@pytest.fixture(autouse=True)
def _built_ins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes ``x.yaml`` into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("x.yaml").write_text(text, encoding="utf-8")
        return "x.yaml"

    return write


def refusal(path: str | None, *overrides: str) -> str:
    with pytest.raises(FalconLabError) as caught:
        load_experiment(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_file_is_the_experiment_of_all_defaults(yaml: Callable[[str], str]) -> None:
    experiment = load_experiment(yaml(""))
    plain, defaults = to_plain(experiment), to_plain(Experiment(out="runs/experiment"))
    for name in NODES:
        assert plain.pop(name)["name"] == defaults.pop(name)["name"]
    assert plain == defaults


def test_component_nodes_come_back_with_all_their_options(yaml: Callable[[str], str]) -> None:
    experiment = load_experiment(yaml(YAML))
    assert experiment.tree == {"name": "chain", "depth": 6, "proposal": "sampled"}
    assert experiment.drafter["fuse"] == "lstm"
    row = experiment.evaluation.methods["chain"].tree
    assert row == {"name": "chain", "depth": 4, "proposal": "sampled"}


def test_an_optional_row_may_name_what_is_not_installed(yaml: Callable[[str], str]) -> None:
    row = load_experiment(yaml(YAML)).evaluation.methods["rival"]
    assert row.drafter == {"name": "not-installed", "n": 3}
    message = refusal(yaml(YAML.replace("optional: true", "optional: false")))
    assert message.startswith("x.yaml:9: evaluation.methods.rival.drafter.name: no drafter named")


def test_overrides_reach_options_of_components(yaml: Callable[[str], str]) -> None:
    path = yaml(YAML)
    assert load_experiment(path, ["tree.depth=5"]).tree["depth"] == 5
    assert load_experiment(path, ["--drafter.block=4"]).drafter["block"] == 4
    rows = load_experiment(path, ["evaluation.methods.chain.tree.depth=2"]).evaluation.methods
    assert rows["chain"].tree is not None
    assert rows["chain"].tree["depth"] == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["tree.name=static", "tree.template=fig5"],
        ["tree.template=fig5", "tree.name=static"],  # the order in which a sweep sorts them
        ["tree={'name': 'static', 'template': 'fig5'}"],
    ],
)
def test_another_name_drops_the_options_of_the_old_component(
    yaml: Callable[[str], str], overrides: list[str]
) -> None:
    tree = load_experiment(yaml(YAML), overrides).tree
    assert tree["name"] == "static"
    assert tree["template"] == "fig5"
    assert "depth" not in tree


def test_the_same_name_keeps_the_options_of_the_file(yaml: Callable[[str], str]) -> None:
    assert load_experiment(yaml(YAML), ["tree.name=chain"]).tree["depth"] == 6
    unnamed = yaml("tree: {depth: 7}")
    assert load_experiment(unnamed, ["tree.name=chain"]).tree["depth"] == 7


def test_interpolations_see_defaults_of_components(yaml: Callable[[str], str]) -> None:
    text = "name: a\ntree: {name: chain, depth: '${drafter.layers}'}\ntrainer: {max_steps: 3}\n"
    experiment = load_experiment(yaml(text), ["drafter.layers=2"])
    assert experiment.tree["depth"] == 2
    assert experiment.out == "runs/a"
    assert load_experiment(yaml(text)).tree["depth"] == 1


def test_whole_floats_serve_where_an_int_is_asked(yaml: Callable[[str], str]) -> None:
    overrides = ["drafter.block=4.0", "data.length=1e3", "seeds=[1.0, 2]", "trainer.max_steps=4.0"]
    experiment = load_experiment(yaml("data: {batch_size: 4.0}"), overrides)
    values = (
        experiment.drafter["block"],
        experiment.data.length,
        *experiment.seeds,
        experiment.trainer["max_steps"],
        experiment.data.batch_size,
    )
    assert values == (4, 1000, 1, 2, 4, 4)
    assert all(type(value) is int for value in values)


def test_a_section_that_is_null_by_default_can_be_given_by_override() -> None:
    recipe = load_experiment(None, ["target.pretraining.steps=7"]).target.pretraining
    assert recipe is not None
    assert (recipe.steps, recipe.length) == (7, 256)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tree.dept=3", "tree.dept: unknown key; did you mean 'depth'?"),
        ("data.lenth=3", "data.lenth: unknown key; did you mean 'length'?"),
        ("evaluation.methods.chain.tree.dept=3", "chain.tree.dept: unknown key; did you mean 'dep"),
        ("evaluation.methods.chain.tre.depth=3", "methods.chain.tre: unknown key; did you mean 't"),
        ("objectiv.soft=1", "objectiv: unknown key; did you mean 'objective'?"),
        ("target.pretraining.model.hiden=3", "model.hiden: unknown key; did you mean 'hidden'?"),
        ("tree.name=statc", "tree.name: no tree_builder named 'statc'; did you mean 'static'?"),
        ("glancing.name=null", "glancing.name: is missing; known: csgd, random"),
        ("acceptance.x=1", "acceptance.x: unknown key; acceptance_rule 'auto' has no options"),
        ("data.length=abc", "data.length: Value 'abc' of type 'str' is not a whole number"),
        ("drafter.block=1.5", "drafter.block: Value '1.5' of type 'float' is not a whole number"),
        ("drafter.block=0", "drafter.block: is 0; it must be at least 1"),
        ("tree.proposal=soft", "tree.proposal: is 'soft'"),
        ("data.length=???", "data.length: has no value yet"),
        ("data=3", "data: must be a mapping of keys to values, not 3"),
        ("data=null", "data: is empty"),
        ("tree=static", "tree: must be a mapping of keys to values, as in {name: static}"),
        ("stages=evaluate", "stages: must be a list, as in [evaluate]"),
        ("stages=[evalute]", "stages[0]: is 'evalute'; did you mean 'evaluate'?"),
        ("out=${nam}", "out: Interpolation key 'nam' not found"),
        ("tree.depth=[1, 2", "tree.depth: the value cannot be read"),
        ("trainer.max_stepz=3", "trainer.max_stepz: is no argument of Lightning's Trainer; did"),
        ("seed.x=3", "seed: Value"),
        ("name.x=3", "name.x: name is 'fast', which has no keys"),
    ],
)
def test_a_wrong_override_is_named_with_its_full_key(
    yaml: Callable[[str], str], override: str, expected: str
) -> None:
    message = refusal(yaml(YAML), override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("  dept: 6", "x.yaml:4: tree.dept: unknown key; did you mean 'depth'?"),
        ("  depth: six", "x.yaml:4: tree.depth: Value 'six' of type 'str' is not a whole number"),
        ("  depth: null", "x.yaml:4: tree.depth: cannot be null"),
        ("  proposal: soft", "x.yaml:4: tree.proposal: is 'soft'"),
        ("wandb: {mode: of}", "x.yaml:4: wandb.mode: is 'of'; known: offline, online, disabled"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(
    yaml: Callable[[str], str], line: str, expected: str
) -> None:
    path = yaml(f"name: a\ntree:\n  name: chain\n{line}\n")
    assert refusal(path, "tree.name=chain").startswith(expected)


def test_an_override_beside_a_wrong_line_is_not_blamed(yaml: Callable[[str], str]) -> None:
    path = yaml("tree: {name: chain, proposal: soft}")
    assert refusal(path, "tree.depth=3").startswith("x.yaml:1: tree.proposal")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "x.yaml:3: broken YAML"),
        ("seed: 1\nseed: 2\n", "x.yaml:2: broken YAML: found duplicate key seed"),
        ("- 1\n- 2\n", "x.yaml: must be a mapping of keys to values"),
        ("out: ${\n", "x.yaml: out: "),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    yaml: Callable[[str], str], text: str, expected: str
) -> None:
    assert refusal(yaml(text)).startswith(expected)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    assert refusal(str(tmp_path / "no.yaml")).startswith(f"{tmp_path / 'no.yaml'}: no such file")
    assert "is a folder" in refusal(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(str(tmp_path / "binary.yaml"))


def test_the_resolved_experiment_loads_to_itself(yaml: Callable[[str], str]) -> None:
    text = YAML + "seeds: [0, 1]\n"
    texts = r"""evaluation.prompts.texts=["a \${b} c", '1e-4', "None", "line\nline", 'x: y']"""
    template = "evaluation.methods.tree.tree={'name': 'static', 'template': {'': 2, '0': 1}}"
    experiment = load_experiment(yaml(text), [texts, template])
    assert experiment.evaluation.prompts.texts[0] == "a ${b} c"
    assert load_experiment(yaml(dump(experiment))) == experiment


def test_what_is_a_comparisons_is_named_and_an_empty_one_of_older_versions_is_not(
    yaml: Callable[[str], str],
) -> None:
    for key in ("base: y.yaml", "heads: {a: {}}", "variants: {a: []}"):
        message = refusal(yaml(f"name: a\n{key}\n"))
        name = key.partition(":")[0]
        assert message == f"x.yaml:2: {name}: is a comparison's: falcon-lab compare x.yaml"
    path = yaml("variants: {}\nseeds: []\n")
    assert load_experiment(path) == load_experiment(yaml(""))
    path = yaml("variants: {a: []}\n")
    assert load_experiment(path, ["variants={}"]) == load_experiment(yaml(""))


def test_the_plain_form_holds_only_what_json_holds() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (int, float, str, bool)

    plain = to_plain(load_experiment(None))
    check(plain)
    assert list(plain) == [field.name for field in fields(Experiment)]


def test_a_typo_imports_nothing_heavy(yaml: Callable[[str], str]) -> None:
    path = yaml("tree: {name: chain, dept: 3}\n")
    program = f"""
import sys
from falcon_lab.cli import main
for arguments in (["run", {path!r}], ["run", {path!r}, "--tree.x=1"], ["evaluate", {path!r}],
                  ["view-data", {path!r}], ["generate", "--prompt", "a", "tree.dept=1"],
                  ["check", "--tree", "chian"], ["run", {path!r}, "~tree.dept", "--dry-run"]):
    try:
        main(arguments)
    except SystemExit as leaving:
        assert leaving.code == 2, leaving.code
heavy = {{"torch", "lightning", "transformers", "wandb", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""
    here = str(Path(falcon_lab.__file__).parents[1])
    paths = os.pathsep.join([*filter(None, sys.path), here])  # a relative PYTHONPATH would be lost
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.splitlines()) == 7
