"""What would be found after hours is found before anything is trained, measured or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from falcon_lab import experiment
from falcon_lab.config.load import load_experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.files import cache_folder
from running import SMOKE, environment, refused


def described(hidden: int) -> str:
    """The description of a drafter for a target of a hidden size."""
    content = {
        "format": 1,
        "drafter": {"name": "falcon"},
        "provenance": {"name": "falcon", "distribution": "falcon-lab", "version": "0"},
        "target": {"name": "other", "fingerprint": "f", "hidden_size": hidden},
    }
    return json.dumps(content)


FILES = {
    "empty.jsonl": "",
    "half.jsonl": '{"question_id": 1, "turns": ["a"]}\n{"question_id": 2',
    "other.jsonl": '{"text": "a"}\n',
    "twice.jsonl": '{"question_id": 1, "turns": ["a"]}\n' * 2,
    "chats.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n' * 3,
    "two.jsonl": '{"text": "a"}\n' * 2,
    "broken.jinja": "{% for message in messages %}",
    "file": "a",
    "saved/config.json": described(8),
    "saved/model.safetensors": "",
    "weightless/config.json": described(64),
}

LATE = [
    # prompts
    ("evaluation.prompts.name=no-such-set", "no-such-set"),
    ("evaluation.prompts.name=empty.jsonl", "no prompt in it"),
    ("evaluation.prompts.name=half.jsonl", "half.jsonl:2"),
    ("evaluation.prompts.name=other.jsonl", "other.jsonl:1"),
    ("evaluation.prompts.name=twice.jsonl", "twice.jsonl:2"),
    ("evaluation.prompts.name=humaneval", "evaluation.prompts.name=humaneval"),
    ("evaluation.prompts.texts=['']", "evaluation.prompts.texts"),
    # methods
    ("evaluation.methods.chain.drafter_path=nowhere", "evaluation.methods.chain.drafter_path"),
    ("evaluation.methods.chain.drafter_path=saved", "trained for other"),
    ("evaluation.methods.chain.drafter_path=weightless", "model.safetensors is missing"),
    ("acceptance.name=greedy evaluation.temperature=1", "acceptance 'greedy'"),
    ("tree.template=k9-nosuch", "k9-nosuch"),
    # the data
    ("data.corpus=nowhere", "nowhere"),
    ("data.corpus=two.jsonl", "at least 3"),
    ("data.corpus=chats.jsonl", "data.chat_template=plain"),
    ("data.corpus=chats.jsonl data.chat_template=nowhere.jinja", "nowhere.jinja"),
    ("data.corpus=chats.jsonl data.chat_template=broken.jinja", "template"),
    ("data.length=4096", "data.length"),
    ("data.feature_store=file", "file"),
    ("target.pretraining.corpus=nowhere", "nowhere"),
    # the training
    ("trainer.accelerator=gpu", "trainer.accelerator"),
    ("trainer.precision=8", "trainer.precision"),
    ("trainer.strategy=nosuch", "trainer.strategy"),
    ("trainer.devices=0", "trainer.devices"),
    ("trainer.val_check_interval=100", "trainer.val_check_interval"),
    ("trainer.enable_checkpointing=false", "trainer.enable_checkpointing"),
    ("drafter.name=lookup", "drafter.name"),
    # machine and places
    ("target.device=cuda:7", "target.device"),
    ("target.attention=flash_attn", "flash"),
    ("out=file", "file"),
    ("out=file/below", "file"),
]


@pytest.fixture(autouse=True)
def _among_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize(("overrides", "named"), LATE)
def test_what_a_late_stage_would_refuse_is_refused_first(
    overrides: str, named: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FalconLabError) as caught:
        experiment.check(load_experiment(SMOKE, overrides.split()), announce=print)
    assert named in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_all_is_well_with_what_is_well_and_nothing_is_touched(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ahead = experiment.check(load_experiment(SMOKE), announce=print)
    assert ahead.stands_in
    assert ahead.target.hidden_size == 64
    assert sorted(tmp_path.rglob("*")) == before
    assert not cache_folder().exists()


def test_a_folder_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(FalconLabError, match="file"):
        experiment.check(load_experiment(SMOKE), announce=print)


def test_passes_that_no_compiler_could_compile_are_refused_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FalconLabError, match=r"CXX.*decoding\.compile=none"):
        experiment.check(load_experiment(SMOKE, ["decoding.compile=all"]), announce=print)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["budgets=[best]", "tuning.source=nowhere"], "nowhere"),
        (["temperatures=[0, 1]", "acceptance.name=greedy"], "acceptance 'greedy'"),
        (["heads.two.objective.name=nosuch"], "heads.two.objective.name"),
        (["heads.two.distillation.unroll=2", "distillation.compile=true"], "unroll"),
    ],
)
def test_a_comparison_is_checked_as_a_whole_before_the_first_head_is_trained(
    overrides: list[str], named: str, tmp_path: Path
) -> None:
    both = ["heads.one.drafter.block=2", "heads.two.drafter.block=3", "budgets=[own]"]
    smallest = ["out=runs", "evaluation.methods={}"]
    line = refused("compare", SMOKE, *smallest, *both, *overrides)
    assert named in line
    assert not (tmp_path / "runs").exists()
    assert not cache_folder().exists()


def test_a_dry_run_checks_files_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from falcon_lab.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    words = ["run", str(SMOKE), "--dry-run"]
    for more, rc in ([], 0), (["evaluation.prompts.name=half.jsonl"], 2):
        done = subprocess.run(
            [sys.executable, "-c", code, *words, *more],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == rc, done.stderr
    assert "half.jsonl:2" in done.stderr
