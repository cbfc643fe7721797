"""Whatever a hasty user or a stranger's file does is refused in a few lines, and touches nothing.

The tables are in ``bad_inputs``; a row is a command line and what is done to the folder before.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click
import pytest
import torch

from bad_inputs import command_lines, configurations, folders, strangers
from bad_inputs.case import BadInput, Change, attempt, faults, write
from bad_inputs.prepared import prepare
from falcon_lab import cli
from falcon_lab.errors import FalconLabError

pytestmark = pytest.mark.timeout(60)

CASES: list[BadInput] = [
    *command_lines.CASES,
    *configurations.CASES,
    *folders.CASES,
    *strangers.CASES,
]


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test() -> Iterator[None]:
    """What commands set in this process: warnings, logging, and torch's threads and numbers."""
    logger, threads = logging.getLogger(), torch.get_num_threads()
    handlers, level = list(logger.handlers), logger.level
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        yield
    logger.handlers[:], logger.level = handlers, level
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FALCON_LAB_CACHE", "cache")
        patch.setenv("FALCON_LAB_PLUGINS", "")
        patch.delenv("WANDB_MODE", raising=False)
        prepare(folder)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder, which is the current one and holds the cache."""

    def train_target(*arguments: object) -> None:
        raise AssertionError("no bad input trains a target")

    monkeypatch.setattr("falcon_lab.pretraining.target.train_target", train_target)
    copy = shutil.copytree(prepared, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("FALCON_LAB_CACHE", "cache")
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return Path(copy)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_refused(case: BadInput, folder: Path) -> None:
    refusal = attempt(case, folder)
    wrong = list(faults(case, refusal))
    assert not wrong, (wrong, refusal.errors[-2000:])


def test_every_bad_input_has_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


# --- the test itself can fail ---------------------------------------------------------------------

TYPO = BadInput("a typo", "run x.yaml tree.dept=3", "tree.dept", "did you mean 'depth'")


def said_of(case: BadInput, folder: Path) -> str:
    return "; ".join(faults(case, attempt(case, folder)))


def test_a_good_refusal_has_no_fault(folder: Path) -> None:
    assert not said_of(TYPO, folder)


def test_what_is_no_refusal_is_found(folder: Path) -> None:
    assert "exit code 0" in said_of(BadInput("good", "run x.yaml --dry-run", "x", "y"), folder)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (KeyError("tree"), "a traceback"),
        (FalconLabError("tree.dept: unknown key"), "does not say \"did you mean 'depth'\""),
        (FalconLabError("did you mean 'depth'?"), "does not say 'tree.dept'"),
        (FalconLabError("tree.dept: did you mean 'depth'? " + "x" * 600), "characters"),
        (SystemExit(1), "exit code 1"),
    ],
)
def test_a_bad_refusal_is_found(
    error: BaseException, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("falcon_lab.commands.run.load_experiment", fail)
    assert fault in said_of(TYPO, folder)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda: write("runs/tiny/results.json", "{}")(), "runs/tiny/results.json was"),
        (lambda: write("new/file", "")(), "new/file was absent"),
        (lambda: shutil.rmtree("runs/tiny/drafter"), "runs/tiny/drafter was a folder and is abs"),
        (lambda: Path("x.yaml").rename("y.yaml"), "y.yaml was absent"),
        (lambda: click.echo("\n\nTraceback (most recent call last):", err=True), "a traceback"),
    ],
)
def test_a_refusal_that_touches_something_is_found(
    spoil: Change, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cli.MendableError.show

    def show(self: cli.MendableError, file: IO[str] | None = None) -> None:
        spoil()
        real(self)

    monkeypatch.setattr(cli.MendableError, "show", show)
    assert fault in said_of(TYPO, folder)
