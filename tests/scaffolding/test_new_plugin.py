"""What ``falcon-lab new-plugin`` writes installs, is listed, and passes its own test."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

from falcon_lab.scaffolding.plugin import KINDS
from generated import write_all
from running import environment, invoke, refused, run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def site(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all of them are installed in, from wheels."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    folders = [str(folder) for folder in written.values()]
    build = ["wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), *folders]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    found = [str(wheel) for wheel in sorted(wheels.glob("*.whl"))]
    put = ["install", *offline, "--target", str(site), *found]
    subprocess.run([*pip, *put], check=True, capture_output=True)
    return site


def apart(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own that finds the installed distributions."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        env=environment(PYTHONPATH=str(site)) | ALL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


ALL = {"FALCON_LAB_PLUGINS": ",".join(f"new-{kind}" for kind in KINDS)}


def test_all_of_them_install_and_are_listed(site: Path) -> None:
    names = {found.metadata["Name"] for found in distributions(path=[str(site)])}
    assert names == {f"new-{kind}" for kind in KINDS}
    listing = json.loads(apart(site, "falcon_lab", "plugins", "--json", "--strict").stdout)
    assert listing["failures"] == []
    ours = {
        (each["kind"], each["name"])
        for each in listing["components"]
        if each["distribution"] in names
    }
    assert ours == {(about.kind, f"new-{kind}") for kind, about in KINDS.items()}


@pytest.mark.slow
def test_all_of_them_pass_their_own_tests(site: Path, written: dict[str, Path]) -> None:
    folders = [str(folder / "tests") for folder in written.values()]
    settings = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(site)]
    done = apart(site, "pytest", *settings, *folders)
    assert f"{len(KINDS)} passed" in done.stdout, done.stdout + done.stderr


def test_the_command_says_what_to_do_next(tmp_path: Path) -> None:
    said = run("new-plugin", "my-head", "--into", str(tmp_path))
    assert f"pip install -e {tmp_path / 'my-head'}" in said
    project = tomllib.loads((tmp_path / "my-head/pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"falcon_lab": {"my-head": "my_head"}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my-head"]


def test_the_readme_shows_the_name_in_a_yaml(written: dict[str, Path]) -> None:
    for name, folder in written.items():
        assert f"{{name: {name}}}" in (folder / "README.md").read_text()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my-head").mkdir()
    assert "my-head is there already" in refused("new-plugin", "my-head", "--into", str(tmp_path))
    assert not any((tmp_path / "my-head").iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my head", "no name of a distribution"),
        ("-head", "no such option"),
        ("head-", "no name of a distribution"),
        ("3heads", "cannot be imported"),
        ("class", "cannot be imported"),
        ("json", "would hide"),
        ("Falcon.Lab", "would hide"),
        ("falcon", "comes with falcon-lab"),
        ("../head", "no name of a distribution"),
    ],
)
def test_a_name_that_pip_or_python_does_not_take_is_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    done = invoke("new-plugin", name, "--into", str(tmp_path))
    assert done.exit_code == 2
    assert said in done.stderr.lower()
    assert not any(tmp_path.iterdir())


def test_a_kind_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = invoke("new-plugin", "mine", "--kind", "engine", "--into", str(tmp_path))
    assert done.exit_code == 2
    assert "tree-builder" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused("new-plugin", "my-head", "--into", str(tmp_path / "file" / "deeper"))
    assert "cannot be written" in said


def test_a_name_with_dots_and_capitals_is_normalised(tmp_path: Path) -> None:
    run("new-plugin", "My.Head-2", "--into", str(tmp_path), "--kind", "controller")
    assert (tmp_path / "My.Head-2/src/my_head_2/controller.py").exists()
