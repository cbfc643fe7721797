"""Saved drafters and corpora that a distribution brings by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from falcon_lab.config.saved import decoding_experiment, opened_drafter, saved_experiment
from falcon_lab.config.schema import TargetConfig
from falcon_lab.data.corpora import corpus, corpus_files, corpus_fingerprint
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.loading import load_target
from falcon_lab.plugins.discovery import load_components
from installing import Site
from running import invoke, refused
from saved_models import save_untrained
from tiny_models import save_tiny

PLUG_IN = """
from pathlib import Path
from falcon_lab import hookimpl

@hookimpl
def register_components(register):
    register.saved_drafter("mine", Path({folder!r}) / "drafter")
    register.corpus("chats", Path({folder!r}) / "chats.jsonl")
"""
SHORT = ("--prompt=ab", "--max-new-tokens=4")


@pytest.fixture
def place(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of an installed plug-in, whose drafter names its target by path."""
    folder = tmp_path / "files"
    target = load_target(TargetConfig(name=str(save_tiny(folder / "target")), device="cpu"))
    save_untrained(folder / "drafter", target, load_components())
    lines = [json.dumps({"text": f"text number {number}"}) for number in range(9)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    site.install("files-of-mine", PLUG_IN.format(folder=str(folder)))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def test_a_drafter_by_name_decodes_for_the_target_that_it_names(place: Path) -> None:
    by_name, by_path = (
        invoke("generate", "--drafter", drafter, *SHORT) for drafter in ("mine", place / "drafter")
    )
    assert by_name.exit_code == 0, by_name.output
    assert "τ" in by_name.stderr
    assert by_name.stdout == by_path.stdout
    as_a_part = ("drafter.name=saved", "drafter.path=mine", f"target.name={place / 'target'}")
    assert invoke("generate", *SHORT, *as_a_part).stdout == by_name.stdout


def test_a_drafter_by_name_is_evaluated_under_its_name(place: Path) -> None:
    for name in ("mine", "files-of-mine/mine"):
        experiment = saved_experiment(name, [])
        assert experiment.out == "runs/evaluate-mine"
        assert experiment.evaluation.methods["chain"].drafter_path == name
        assert experiment.target.name == str(place / "target")


def test_a_name_goes_before_a_folder_and_a_path_is_always_a_folder(place: Path) -> None:
    here = Path("mine")
    (place / "drafter").rename(here)
    with opened_drafter("./mine") as folder:
        assert folder == here
    with pytest.raises(FalconLabError, match=r"saved drafter 'mine': .* is missing.*files-of-mine"):
        decoding_experiment("mine", [])


def test_an_unknown_name_is_told_the_known_ones(place: Path) -> None:
    for command in (
        ["generate", "--drafter", "mien", *SHORT],
        ["tune", "mien"],
        ["evaluate", "mien"],
    ):
        said = refused(*command)
        assert "did you mean 'mine'" in said
    with pytest.raises(FalconLabError, match="did you mean 'chats'"):
        corpus("chat", split="train")


def test_a_distribution_is_named_where_what_it_brings_is_damaged(place: Path) -> None:
    weights = place / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    said = refused("generate", "--drafter", "mine", *SHORT)
    assert "files-of-mine 0.1" in said
    assert "cut short" in said
    (place / "drafter" / "config.json").unlink()
    assert "files-of-mine 0.1" in refused("generate", "--drafter", "mine", *SHORT)


def test_a_drafter_by_name_is_refused_by_another_target(place: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=5)
    said = refused("generate", "--drafter", "mine", "--target", str(other), *SHORT)
    assert "files-of-mine" in said
    assert "fingerprint" in said
    target, components = load_target(TargetConfig(name=str(other))), load_components()
    with pytest.raises(FalconLabError, match="fingerprint"):
        components.build("drafter", {"name": "saved", "path": "mine"}, BuildContext(host=target))


def test_a_corpus_by_name_is_the_file(place: Path) -> None:
    file = place / "chats.jsonl"
    for name in ("chats", "files-of-mine/chats"):
        assert corpus_files(name) == [file]
        assert corpus_fingerprint(name) == corpus_fingerprint(str(file))
        ids = [document.id for document in corpus(name, split="train")]
        assert ids == [document.id for document in corpus(str(file), split="train")]
    assert "text number" in invoke("view-data", "chats", f"target.name={place / 'target'}").stdout
    file.unlink()
    with pytest.raises(FalconLabError, match=r"corpus 'chats': .*install files-of-mine again"):
        corpus("chats", split="train")


def test_they_are_listed(place: Path) -> None:
    listed = invoke("plugins").stdout
    assert "saved_drafter" in listed
    assert "chats" in listed


def test_a_path_that_depends_on_the_working_folder_is_refused(site: Site) -> None:
    site.install("files-of-mine", PLUG_IN.format(folder="somewhere"))
    with pytest.warns(match="no absolute path"):
        assert load_components().failures
