"""Runs the command line on something so small that a whole experiment takes seconds.

``smoke()`` is ``experiments/smoke.yaml`` as overrides, for any other experiment: the same target,
which is then trained once in a session of tests, and as little data and training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

import falcon_lab
from falcon_lab.measure.results import load_results

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
SMOKE = EXPERIMENTS / "smoke.yaml"

SHORTEST = [
    "trainer.max_steps=4",
    "trainer.val_check_interval=4",
    "trainer.check_val_every_n_epoch=null",
    "distillation.decode_every=4",
    "distillation.decode_tokens=8",
    "evaluation.prompts.limit=1",
    "evaluation.max_new_tokens=12",
    "evaluation.hf_generate=false",
    "evaluation.repeats=1",
]


def overrides(node: Mapping[str, Any], prefix: str) -> list[str]:
    """A nested mapping as ``key=value``."""
    found = []
    for key, value in node.items():
        name = f"{prefix}.{key}"
        found += overrides(value, name) if isinstance(value, dict) else [f"{name}={value}"]
    return found


def smoke(*more: str, target: bool = True) -> list[str]:
    """What makes another experiment as small as ``smoke.yaml``, and smaller."""
    small = yaml.safe_load(SMOKE.read_text(encoding="utf-8"))
    sections = (["target"] if target else []) + ["data", "distillation"]
    settings = [text for name in sections for text in overrides(small[name], name)]
    return [*settings, *SHORTEST, *more]


def invoke(*arguments: str | Path) -> Result:
    """``falcon-lab`` in this process."""
    from falcon_lab.cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run(*arguments: str | Path) -> str:
    """``falcon-lab`` in this process, which must succeed: what it printed."""
    done = invoke(*arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str | Path) -> str:
    """``falcon-lab`` in this process, which must end with 2 and one line: that line."""
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("falcon-lab:")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def command(*arguments: str | Path) -> list[str]:
    """The same as a command line of its own."""
    return [sys.executable, "-m", "falcon_lab", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """What a process of its own needs to find this source first."""
    here = str(Path(falcon_lab.__file__).parents[1])
    found = [*filter(None, [more.pop("PYTHONPATH", ""), here, os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), **more}


def run_apart(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """``falcon-lab`` in a process of its own, which must succeed."""
    done = subprocess.run(
        command(*arguments), env=environment(**env), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def products(folder: Path, methods: Sequence[str]) -> dict[str, Any]:
    """See that a finished run left everything; its results."""
    for name in ("model.safetensors", "config.json", "README.md"):
        assert (folder / "drafter" / name).stat().st_size > 0, name
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    results = load_results(folder / "results.json")
    assert set(methods) <= set(results["methods"])
    for name in ("plain", *methods):
        assert (folder / "answers" / f"{name}.jsonl").read_text(encoding="utf-8").strip()
    for row in results["rows"]:
        if results["methods"][row["method"]]["lossless"] and row["method"] != "plain":
            assert row["identical"] is True, (row["method"], row["prompt"])
    return results
