"""Every command of the README is run, with small settings where it would take long."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from running import EXPERIMENTS, ROOT, SHORTEST, invoke, refused, run, smoke

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(language: str = "bash") -> list[str]:
    """The commands of the README's blocks, continued lines joined, comments cut off."""
    blocks = [text for name, text in BLOCK.findall(README) if name == language]
    joined = "\n".join(blocks).replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines())
    return [" ".join(line.split()) for line in lines if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with the experiments, chats and a finished smoke run in it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "experiments").symlink_to(EXPERIMENTS)
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (folder / "chats.jsonl").write_text(4 * (json.dumps({"messages": said}) + "\n"))
    (folder / "prompts.jsonl").write_text('{"question_id": 1, "turns": ["2 + 3?"]}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALCON_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.chdir(folder)
        run("run", "experiments/smoke.yaml", *smoke(target=False))
        yield folder


Check = Callable[[str], None]


def short(*more: str, target: bool = True) -> Check:
    """Run it with settings that take a second; what it says itself comes last, and counts."""

    def check(text: str) -> None:
        words = shlex.split(text)
        kept = [word for word in words[1:] if not word.startswith("trainer.max_steps")]
        run(*kept[:2], *smoke(*more, target=target), *kept[2:])

    return check


def whole(*more: str) -> Check:
    """Run it as it stands, or nearly."""
    return lambda text: says_something(run(*shlex.split(text)[1:], *more))


def says_something(printed: str) -> None:
    assert printed


def doctor_works(text: str) -> None:
    """What the doctor finds differs from machine to machine; that it looks to the end does not."""
    looked = invoke(*shlex.split(text)[1:])
    mendable = re.search(r"^! ", looked.stdout, re.MULTILINE)
    assert looked.exit_code == (3 if mendable else 0), looked.exception
    assert "bin/lightning" in looked.stdout


def dry(text: str) -> None:
    """For what needs the network: every word of it is checked."""
    printed = run(*shlex.split(text)[1:], "--dry-run")
    assert "name: Qwen/Qwen3-0.6B" in printed
    assert "corpus: chats.jsonl" in printed


def installs(text: str) -> None:
    """The folders that pip is given hold distributions, and the command after it is ours."""
    install = next(part for part in text.split("&&") if "pip install ." in part)
    for folder in install.split()[2:]:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        assert project["name"].startswith("falcon-lab")
    last = shlex.split(text.split("&&")[-1])
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert last[0] in ours
    run(*last[1:], "--dry-run")


def tox_runs_the_tests(text: str) -> None:
    """``.ci/run`` calls just this, and tox has something to call."""
    assert text == "pip install tox && tox"
    assert (ROOT / "tox.ini").exists()
    assert "tox" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def compares_runs(text: str) -> None:
    """With the smoke run in the place of both, under another name."""
    for name in ("csgd", "k1"):
        if not Path("runs", name).exists():
            Path("runs", name).symlink_to("smoke")
    printed = run(*shlex.split(text)[1:], *SHORTEST)
    assert re.search(r"^csgd +chain-8 ", printed, re.MULTILINE)
    assert re.search(r"^k1 +tree-16 ", printed, re.MULTILINE)


def beside_the_paper(text: str) -> None:
    """The paper's figures, ours, and what becomes of their order."""
    printed = run(*shlex.split(text)[1:], *smoke("seeds=[0]"))
    assert re.search(r"^falcon own +3.1 ", printed, re.MULTILINE)
    assert re.search(r"^order of τ draft: (not )?(reproduced|clear)", printed, re.MULTILINE)


PLAN = (
    "falcon-lab plan --parameters 70.55B --hidden 8192 --layers 80 --vocab 128256 --tokens 1B "
    "--devices 8"
)
EXPORT = "falcon-lab export runs/eagle3/drafter exported --to vllm"


def exports_a_trained_head(text: str) -> None:
    """With a head of the kind that the path names, trained for a few steps."""
    words = shlex.split(text)[1:]
    head = ["drafter={name: eagle3, taps: [0, 1, 2]}", "glancing.name=none", "objective.feature=0"]
    head += ["target.pretraining.model.layers=4"]  # of which three are read
    folder = Path(words[1]).parent
    stages = "stages=[target,data,distil]"
    run("run", "experiments/smoke.yaml", *smoke(*head, f"out={folder}", stages, target=False))
    run(*words)
    assert Path(words[2], "config.json").exists()


def is_not_sent_offline(text: str) -> None:
    """``tests/export/`` sends to a stand-in of the hub; without a network it is refused."""
    if not Path("exported").exists():
        exports_a_trained_head(EXPORT)
    assert "HF_HUB_OFFLINE" in refused(*shlex.split(text)[1:])


CHECKS: dict[str, Check] = {
    "pip install . ./plugins/falcon-lab-lookup && lightning run experiments/csgd.yaml": installs,
    "python3 -m venv .venv && . .venv/bin/activate && pip install . ./plugins/falcon-lab-lookup "
    "&& lightning run experiments/csgd.yaml": installs,
    "pip install tox && tox": tox_runs_the_tests,
    "falcon-lab run experiments/smoke.yaml": short(target=False),
    "falcon-lab run experiments/csgd.yaml drafter.block=3 out=runs/k3": short(),
    "falcon-lab run experiments/csgd.yaml --dry-run": whole(),
    "falcon-lab evaluate runs/smoke": whole("evaluation.max_new_tokens=4"),
    'falcon-lab generate --drafter runs/smoke/drafter --prompt "def add("': whole(
        "--max-new-tokens=8"
    ),
    "falcon-lab check --drafter runs/smoke/drafter --tree static": whole(
        "--prompts=1", "--samples=20", "evaluation.max_new_tokens=8"
    ),
    "falcon-lab bench --drafter runs/smoke/drafter --tree static --tree chain,depth=4 "
    "target.lean=true --json bench.json --profile trace.json": whole(
        "--max-new-tokens=8", "evaluation.prompts.limit=1", "evaluation.repeats=1"
    ),
    "falcon-lab bench --drafter runs/smoke/drafter --batch-sizes 1,4,8 target.lean=true": whole(
        "--max-new-tokens=8", "evaluation.prompts.limit=3", "evaluation.repeats=1"
    ),
    "falcon-lab tune runs/smoke/drafter target.lean=true": whole(
        *("--texts=4", "--nodes=4", "--depth=4", "--tree=chain", "--max-new-tokens=32"),
        *("evaluation.prompts.limit=1", "evaluation.repeats=1"),
    ),
    "falcon-lab run experiments/csgd.yaml tuned/tuned.yaml out=runs/tuned": whole("--dry-run"),
    "falcon-lab compare experiments/compare.yaml --dry-run": whole(),
    "falcon-lab compare experiments/compare.yaml out=runs/compare": short(
        *("only=[falcon,lookup]", "seeds=[0]", "budgets=[chain-2,best]", "temperatures=[0]"),
        *("tuning.grid=[own,chain-2]", "tuning.prompts=1"),
    ),
    "falcon-lab compare experiments/paper/ablation.yaml": beside_the_paper,
    "falcon-lab compare runs/csgd runs/k1 budgets=[chain-8,tree-16]": compares_runs,
    "falcon-lab view-data experiments/smoke.yaml": whole(),
    "falcon-lab plugins": whole(),
    "falcon-lab new-plugin my-head": whole(),
    "falcon-lab doctor": doctor_works,
    PLAN: whole(),
    EXPORT: exports_a_trained_head,
    "falcon-lab push exported me/eagle3-for-my-target": is_not_sent_offline,
    "falcon-lab run experiments/csgd.yaml target.name=Qwen/Qwen3-0.6B target.dtype=bfloat16 "
    "data.corpus=chats.jsonl evaluation.prompts.name=prompts.jsonl out=runs/qwen3": dry,
}
"""Every command of the README, and what is done with it here."""


def test_every_command_of_the_readme_has_a_test_and_no_test_has_lost_its_command() -> None:
    assert sorted(commands()) == sorted(CHECKS)


@pytest.mark.parametrize("text", list(CHECKS))
def test_a_command_of_the_readme_works(
    text: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    CHECKS[text](text)


def test_every_file_that_the_readme_names_exists() -> None:
    named = re.findall(r"`((?:experiments|docs|plugins|falcon_lab)/[\w./-]+)`", README)
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "src" / name).exists(), name


def test_every_experiment_stands_in_the_readme() -> None:
    for recipe in EXPERIMENTS.rglob("*.yaml"):
        assert f"`{recipe.relative_to(ROOT).as_posix()}`" in README, recipe


def test_the_readmes_plug_in_is_one() -> None:
    [source] = [text for name, text in BLOCK.findall(README) if name == "python"]
    from falcon_lab.plugins.builtins import ChainConfig
    from falcon_lab.plugins.hooks import Register

    space: dict[str, object] = {"MyConfig": ChainConfig}
    exec(compile(source, "README.md", "exec"), space)
    registrar = Register("dist", "1")
    register = space["register_components"]
    assert callable(register)
    register(registrar)
    [component] = registrar.components
    assert (component.kind, component.name) == ("drafter", "mine")


def test_the_readmes_shell_blocks_are_valid_shell() -> None:
    for text in commands():
        subprocess.run(["bash", "-n", "-c", text], check=True)
