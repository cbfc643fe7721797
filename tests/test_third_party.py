"""An installed wheel's drafter, schedule and tree builder, from one YAML to a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import products, run_apart, smoke

RECIPE = """
name: third-party
drafter: {name: sample-mlp}
glancing: {name: sample-step}
tree: {name: sample-rake, width: 2, depth: 2}
evaluation:
  methods:
    rake: {}
    chain: {tree: {name: chain, depth: 3}}
"""

THREE = {"drafter": "sample-mlp", "tree": "sample-rake"}


@pytest.mark.slow
def test_a_yaml_with_all_three_components_of_a_wheel_runs_to_its_report(
    sample_wheel: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    out = tmp_path / "out"
    run_apart(
        "run",
        recipe,
        *smoke(f"out={out}", "wandb.mode=disabled"),
        PYTHONPATH=str(sample_wheel),
        FALCON_LAB_PLUGINS="falcon-lab-sample",
        WANDB_MODE="",
    )
    results = products(out, ["rake", "chain"])
    for kind, name in THREE.items():
        brought = results["components"]["rake"][kind]
        assert (brought["name"], brought["distribution"], brought["version"]) == (
            name,
            "falcon-lab-sample",
            "0.3.0",
        )
    assert results["experiment"]["glancing"]["name"] == "sample-step"
