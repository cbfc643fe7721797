"""An installed wheel's drafter, schedule and tree builder, from one YAML to a report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import products, run, smoke

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


@pytest.fixture
def _installed(sample_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The wheel's components are found in this process, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(sample_wheel))
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "falcon-lab-sample")
    yield
    for name in [name for name in sys.modules if name.startswith("falcon_lab_sample")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_a_yaml_with_all_three_components_of_a_wheel_runs_to_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    out = tmp_path / "out"
    monkeypatch.setenv("WANDB_MODE", "")  # the YAML's own word counts
    run("run", recipe, *smoke(f"out={out}", "wandb.mode=disabled"))
    results = products(out, ["rake", "chain"])
    for kind, name in THREE.items():
        brought = results["components"]["rake"][kind]
        assert (brought["name"], brought["distribution"], brought["version"]) == (
            name,
            "falcon-lab-sample",
            "0.3.0",
        )
    assert results["experiment"]["glancing"]["name"] == "sample-step"
