"""From a comparison's YAML to its plan, and what is said of a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from falcon_lab.errors import ConfigError
from falcon_lab.studies.compare.loading import load_plan
from falcon_lab.studies.compare.plan import describe
from running import environment, refused, run_apart

TEXT = """\
name: test
out: OUT
data: {corpus: generated, batch_size: 2}
trainer: {max_steps: 5}
evaluation: {prompts: {texts: [abc, def]}}
seeds: [0, 7]
budgets: [chain-4, tree-8, own]
heads:
  falcon:
    drafter: {name: falcon, block: 3}
    glancing: {name: csgd}
  linear:
    drafter: {name: falcon, block: 1, fuse: linear}
    glancing: {name: none}
    tree: {name: chain, depth: 5}
  gone:
    optional: true
    drafter: {name: gone, width: 3}
  copied:
    train: false
    drafter: {name: falcon}
  other:
    drafters_of: linear
    acceptance: {name: greedy}
    spend:
      tree-8: {tree: {name: optimal, nodes: 3}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "compare.yaml"
    path.write_text(TEXT.replace("OUT", str(tmp_path / "out")))
    return path


def test_every_head_has_an_experiment_a_seed_in_a_folder_of_its_own(
    recipe: Path, tmp_path: Path
) -> None:
    plan = load_plan(recipe)
    assert [(h.name, h.seeds) for h in plan.heads] == [
        ("falcon", [0, 7]),
        ("linear", [0, 7]),
        ("copied", [0]),
        ("other", [0, 7]),
    ]
    falcon, linear, _, _ = plan.heads
    run = falcon.experiments[7]
    assert (run.seed, run.drafter["block"], run.data.batch_size) == (7, 3, 2)
    assert run.stages == ["target", "data", "distil"]
    assert run.out == str(tmp_path / "out" / "falcon-seed7")
    assert falcon.folders[7] == tmp_path / "out" / "falcon-seed7" / "drafter"
    assert linear.experiment.glancing == {"name": "none"}
    assert linear.experiment.tree["depth"] == 5
    assert plan.base.drafter["block"] == 2  # a head changes nothing of the others


def test_a_head_whose_plug_in_is_not_installed_is_left_out_with_a_line(recipe: Path) -> None:
    plan = load_plan(recipe)
    assert plan.left_out == {"gone": "no drafter named 'gone' is installed"}
    assert "left out: gone (no drafter named 'gone' is installed)" in describe(plan)


def test_a_head_that_is_not_optional_must_be_there(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"heads\.gone\.drafter\.name: no drafter named 'gone'"):
        load_plan(recipe, ["heads.gone.optional=false"])


def test_a_plan_says_how_many_trainings_it_is(recipe: Path, tmp_path: Path) -> None:
    assert "trainings to do: 4, 5 steps each" in describe(load_plan(recipe))
    done = tmp_path / "out" / "linear-seed7" / "drafter"
    done.mkdir(parents=True)
    (done / "config.json").write_text("{}")
    plan = load_plan(recipe)
    assert [(head.name, seed) for head, seed in plan.pending] == [
        ("falcon", 0),
        ("falcon", 7),
        ("linear", 0),
    ]
    said = describe(plan)
    assert "trainings to do: 3" in said
    assert "7 drafters × 3 budgets (chain-4, tree-8, own)" in said


def test_a_head_may_take_the_drafters_of_another_and_decode_otherwise(recipe: Path) -> None:
    plan = load_plan(recipe)
    linear, other = plan.heads[1], plan.heads[3]
    assert other.folders == linear.folders
    assert other.experiment.drafter == linear.experiment.drafter
    assert other.experiment.acceptance == {"name": "greedy"}
    assert other.experiment.tree == plan.base.tree  # its own, and not that of the lender
    assert len(plan.pending) == 4  # and nothing is trained twice
    assert "as linear" in describe(plan)


def test_a_head_trains_the_drafters_itself_when_their_owner_is_not_compared(recipe: Path) -> None:
    plan = load_plan(recipe, ["only=[other]"])
    assert [(head.name, seed) for head, seed in plan.pending] == [("other", 0), ("other", 7)]
    assert plan.heads[0].experiment.drafter["fuse"] == "linear"
    assert plan.heads[0].folders[0].parent.name == "linear-seed0"


def test_a_head_may_say_how_it_spends_a_budget(recipe: Path) -> None:
    plan = load_plan(recipe)
    _, trees, _ = plan.budgets
    linear, other = plan.heads[1], plan.heads[3]
    assert other.at(trees)[1]["name"] == "optimal"
    assert linear.at(trees)[1]["name"] == "dynamic"


def test_only_some_heads_are_compared_where_only_names_them(recipe: Path) -> None:
    assert [h.name for h in load_plan(recipe, ["only=[linear]"]).heads] == ["linear"]


def test_an_override_reaches_the_shared_part_and_a_head(recipe: Path) -> None:
    plan = load_plan(recipe, ["trainer.max_steps=9", "heads.falcon.drafter.block=4"])
    falcon, linear, *_ = plan.heads
    assert falcon.experiment.trainer["max_steps"] == linear.experiment.trainer["max_steps"] == 9
    assert (falcon.experiment.drafter["block"], linear.experiment.drafter["block"]) == (4, 1)


def test_a_file_may_build_on_another(recipe: Path) -> None:
    above = recipe.with_name("above.yaml")
    above.write_text(
        "base: compare.yaml\nname: above\nbudgets: [best]\nonly: [linear, falcon]\n"
        "heads: {falcon: {drafter: {layers: 2}}}\n"
    )
    plan = load_plan(above)
    assert (plan.base.name, plan.base.seeds) == ("above", [0, 7])
    assert [h.name for h in plan.heads] == ["linear", "falcon"]
    assert plan.heads[1].experiment.drafter["layers"] == 2
    assert plan.heads[1].experiment.drafter["block"] == 3
    assert [b.word for b in plan.budgets] == ["best"]


def test_files_that_build_on_each_other_are_refused(recipe: Path) -> None:
    recipe.write_text("base: compare.yaml\n")
    with pytest.raises(ConfigError, match=r"base: compare\.yaml is based on this file itself"):
        load_plan(recipe)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block: 3", "blok: 3", ":10: heads.falcon.drafter.blok: unknown key; did you mean"),
        ("block: 3", "block: x", ":10: heads.falcon.drafter.block: "),
        ("block: 3", "block: 0", ":10: heads.falcon.drafter.block: is 0"),
        ("glancing: {name: csgd}", "glancin: {}", ":11: heads.falcon.glancin: unknown key"),
        ("glancing: {name: csgd}", "data: {}", ":11: heads.falcon.data: every head is trained"),
        ("glancing: {name: csgd}", "train: 3", ":11: heads.falcon.train: is 3; write true or"),
        ("glancing: {name: csgd}", "tree: {name: chian}", ":11: heads.falcon.tree.name: no tree"),
        ("  falcon:\n", "  fal con:\n", ":9: heads.fal con: names a folder"),
        ("chain-4, ", "chain, ", ":7: budgets[0]: no budget 'chain'"),
        ("chain-4, ", "own, ", ":7: budgets: has 'own' twice"),
        ("batch_size: 2", "batchsize: 2", ":3: data.batchsize: unknown key; did you mean"),
        ("seeds: [0, 7]", "temperatures: [-1]", ":6: temperatures[0]: is -1; it must be"),
        ("seeds: [0, 7]", "tuning: {grid: [best]}", ":6: tuning.grid: needs budgets"),
        ("seeds: [0, 7]", "variants: {a: []}", ":6: variants: a comparison has heads instead"),
        ("seeds: [0, 7]", "only: [falcn]", ":6: only: no head 'falcn'; did you mean 'falcon'?"),
        ("seeds: [0, 7]", "only: [gone]", "heads: no head is left to be compared"),
        ("seeds: [0, 7]", "haeds: {}", ":6: haeds: unknown key"),
        ("of: linear", "of: copied", "heads.other.drafters_of: no head 'copied' with trained"),
        ("acceptance: {name: greedy}", "drafter: {}", "heads.other.drafter: the drafters are"),
        ("tree-8: {tree", "tree: {tree", "heads.other.spend.tree: no budget 'tree'"),
        ("tree-8: {tree", "best: {tree", "heads.other.spend.best: is no number of nodes"),
        ("tree-8: {tree", "tree-8: {data", "heads.other.spend.tree-8.data: unknown key"),
        ("nodes: 3", "node: 3", "heads.other.spend.tree-8.tree.node: unknown key; did you mean"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_full_key(
    old: str, new: str, message: str, recipe: Path
) -> None:
    recipe.write_text(recipe.read_text().replace(old, new, 1))
    line = refused("compare", recipe, "--dry-run")
    assert line.startswith(f"falcon-lab: {recipe}")
    assert message in line


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("runs: runs/eagle", "heads.given.runs: must be a list of folders, as in [runs/eagle]"),
        ("runs: []", "heads.given.runs: is empty"),
        ("runs: [gone]", "heads.given.runs: gone: no run's folder"),
        ("runs: [gone], drafter: {block: 2}", "heads.given.drafter: its drafters are trained"),
        ("runs: [gone], train: false", "heads.given.train: its drafters are trained"),
    ],
)
def test_a_head_of_finished_runs_has_nothing_but_ways_to_decode(
    node: str, message: str, recipe: Path
) -> None:
    line = refused("compare", recipe, f"+heads.given={{{node}}}", "--dry-run")
    assert message in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("heads.falcon.drafter.blok=3", "heads.falcon.drafter.blok: unknown key"),
        ("budgets=[tree]", "budgets[0]: no budget 'tree'"),
        ("trainer.max_stesp=3", "trainer.max_stesp: "),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(
    override: str, message: str, recipe: Path
) -> None:
    line = refused("compare", recipe, override)
    assert f"override '{override}': {message}" in line


def test_a_plan_is_printed_without_importing_torch(recipe: Path) -> None:
    script = (
        "import sys; from pathlib import Path; "
        "from falcon_lab.studies.compare.loading import load_plan; "
        "from falcon_lab.studies.compare.plan import describe; "
        "import falcon_lab.studies.compare.plan; "
        f"describe(load_plan(Path({str(recipe)!r}))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True)


def test_the_plan_of_a_dry_run_is_printed_and_nothing_is_made(recipe: Path) -> None:
    done = run_apart("compare", recipe, "--dry-run")
    assert "trainings to do: 4" in done.stdout
    assert not (recipe.parent / "out").exists()


# --- the short form -----------------------------------------------------------------------------


def test_variants_are_heads_and_seeds_alone_make_one(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(
        "name: short\ndrafter: {name: falcon, block: 3, layers: 2}\ntree: {name: chain, depth: 6}\n"
        "seeds: [0, 5]\nvariants: {k2: [drafter.block=2], static: [tree.name=static]}\n"
    )
    k2, static = load_plan(path).heads
    assert [k2.name, static.name] == ["k2", "static"]
    assert k2.seeds == static.seeds == [0, 5]
    assert (k2.experiment.drafter["block"], k2.experiment.drafter["layers"]) == (2, 2)
    assert static.experiment.drafter["block"] == 3
    assert static.experiment.tree["name"] == "static"
    assert "depth" not in static.experiment.tree
    [alone] = load_plan(path, ["variants={}"]).heads
    assert (alone.name, alone.seeds) == ("short", [0, 5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants: {good: [], deep: [tree.dept=9]}", ":1: variants.deep.tree.dept: unknown key"),
        ("variants: {a: [data.length=9]}", ":1: variants.a.data: every head is trained"),
        ("variants: {'a/b': []}", ":1: variants.a/b: is 'a/b'; files are called by it"),
        ("variants: {a: tree.depth=9}", ":1: variants.a: must be a list of overrides"),
        ("variants: [a]", ":1: variants: must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_variant_is_named_as_the_variants(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(f"{text}\n")
    assert refused("run", path, "--dry-run").startswith(f"falcon-lab: {path}{message}")
