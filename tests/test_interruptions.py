"""Every command, interrupted wherever it changes something on disk, goes on and loses nothing."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import interruptions
from falcon_lab.config.schema import STAGES
from installing import install_in_place
from interruptions import SCRATCH, SIGNALS, TEMPORARY, End, Server, Tree, Visit, facts
from running import ROOT, environment

RECIPE = """\
name: small
out: out
target:
  name: small-code
  pretraining:
    documents: 12
    vocabulary: 300
    model: {layers: 1, hidden: 16, intermediate: 16, heads: 1, max_positions: 256}
    length: 64
    batch_size: 2
    steps: 3
    warmup_steps: 1
    checkpoint_every: 1
    gate: {prompts: 1, max_new_tokens: 4}
data: {documents: 8, length: 64, batch_size: 2, validation: 2}
distillation: {checkpoint_every: 2, decode_every: 2, decode_prompts: 1, decode_tokens: 4}
drafter: {name: falcon, block: 2}
tree: {name: chain, depth: 2}
trainer: {max_steps: 4, accelerator: cpu, log_every_n_steps: 1}
evaluation:
  prompts: {limit: 1, prompt_tokens: 24}
  max_new_tokens: 6
  repeats: 1
  threads: 1
  hf_generate: false
  methods: {tree: {}}
wandb: {mode: disabled}
"""
BEGIN: Tree = {"small.yaml": RECIPE.encode()}
FAULTS = ("kill", "torn", "full", "cut", *SIGNALS)


def complaints(visit: Visit, begin: Tree) -> list[str]:
    """What went wrong, a line each."""
    found = [f"{visit.whole.code}: {visit.whole.output}"] if visit.whole.code else []
    for end in visit.ends:
        what = [*about_the_end(end), *about_what_is_left(end, visit.states[end.state], begin)]
        if end.state in visit.resumed:
            what += about_what_came_of_it(visit, end.state)
        found += [f"{end.fault} at {end.place}: {each}" for each in what]
    return found


def about_the_end(end: End) -> Iterator[str]:
    """What is wrong with its exit code and its words."""
    said = [line for line in end.output.splitlines() if line.startswith("falcon-lab:")]
    said = [line for line in said if "falcon-lab: warning:" not in line]  # whom it interrupted
    if "Traceback" in end.output:
        yield f"a traceback: {end.output[-3000:]}"
    if end.fault in SIGNALS:
        code = 128 + getattr(interruptions.signal, end.fault)
        if end.code != code or len(said) != 1 or end.fault not in said[0]:
            yield f"ended with {end.code} and said {said}"
    elif end.fault in ("full", "cut") and end.code:
        mended = any("make room" in line and ": cannot be written" in line for line in said)
        if end.code != 2 or not mended or len(said) > 3:
            yield f"ended with {end.code} and said {said}"


def about_what_came_of_it(visit: Visit, state: int) -> Iterator[str]:
    """What is wrong with the end of the same command, given again."""
    resumed = visit.resumed[state]
    results = visit.results[state]
    if resumed.code == 2 and "is there already" in resumed.output:  # what was made is whole
        results = facts(visit.states[state])
    elif resumed.code:
        yield f"the same command then ended with {resumed.code}: {resumed.output[-1500:]}"
        return
    if differences := differing(results, visit.expected):
        yield f"the same command then left others: {', '.join(differences)}"


def about_what_is_left(end: End, state: Tree, begin: Tree) -> Iterator[str]:
    """What is lost, half-written, or left behind."""
    kept = set(state.values())  # former results are kept under another name
    for name, content in begin.items():
        if content is not None and name not in state and content not in kept:
            yield f"{name} is lost"
    for name, content in state.items():
        unfinished = SCRATCH.search(name) or ".partial" in name
        if not unfinished and content is not None and not is_whole(name, content):
            yield f"{name} is not whole"
        stays = name in begin or name.split("/")[0] == TEMPORARY
        # A signal may come between two instructions: then what a kill leaves may be left.
        if SCRATCH.search(name) and not stays and end.fault in ("full", "cut"):
            yield f"{name} is left behind"


def is_whole(name: str, content: bytes) -> bool:
    """Whether a file of this name has all of its content."""
    try:
        if name.endswith((".json", ".yaml")):
            json.loads(content) if name.endswith(".json") else yaml.safe_load(content)
        if name.endswith(".safetensors"):
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            ends = [value["data_offsets"][1] for key, value in header.items() if key[:2] != "__"]
            return len(content) == 8 + length + max(ends, default=0)
    except ValueError:
        return False
    return not name.endswith(".html") or content.rstrip().endswith(b"</html>")


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Files that are not what an undisturbed run leaves."""
    return sorted(name for name in {*found, *expected} if not same(name, found, expected))


def same(name: str, found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether a file is what an undisturbed run leaves.

    Of the curves the losses of one step may be missing: Lightning logs them after its checkpoint.
    """
    ours, theirs = found.get(name, ""), expected.get(name, "")
    if not name.endswith("history.jsonl") or not ours or not theirs:
        return bool(ours == theirs)
    missing = [step for step, losses in theirs.items() if ours.get(step) != losses]
    return len(missing) <= 1 and all(
        losses.items() <= theirs.get(step, {}).items() for step, losses in ours.items()
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder = tmp_path_factory.mktemp("interruptions")
    with pytest.MonkeyPatch.context() as patch:
        site, project = tmp_path_factory.mktemp("plug-ins"), ROOT / "plugins/falcon-lab-selfspec"
        install_in_place(project, site, patch)
        where = environment(PYTHONPATH=f"{project / 'src'}{os.pathsep}{site}", **alone)
    install(site)
    where["FALCON_LAB_PLUGINS"] += ",falcon-lab-plain"
    with interruptions.server(folder, where) as ready:
        ready.warm(["run", "small.yaml"], BEGIN)
        yield ready


@pytest.fixture(scope="module")
def finished(server: Server) -> Tree:
    """The folder after a run."""
    end, tree = server.run(["run", "small.yaml"], BEGIN)
    assert end.code == 0, end.output
    return tree


COMPARISON = """\
name: both
out: compared
seeds: [0]
temperatures: [0]
budgets: [chain-2]
tuning: {prompts: 1, grid: [own]}
heads:
  csgd: {glancing: {name: csgd}}
  bare: {glancing: {name: none}}
"""
"""The head of a comparison; the recipe follows it."""

SHORT = ["evaluation.max_new_tokens=24", "evaluation.prompts.limit=1", "evaluation.repeats=1"]
LONGER = "evaluation.max_new_tokens=180"
TUNE = ["--texts", "2", "--nodes", "3", "--depth", "2", "--tree", "chain,depth=2"]
BENCH = ["--method", "drafter", "--json", "bench.json"]


DIALOGUES = [
    *("--target", "target", "--out", "dialogues.jsonl", "--tokens", "12", "--part", "4"),
    *("--questions", "questions.jsonl", "--share", "1", "--sampled", "1", "--temperature", "0.8"),
    *("--answer-tokens", "2", "data.chat_template=chat.jinja"),
]
SEARCH = [
    *("--method=tree", "--by=cost", "--over=drafter.skip_mlp=0..0", "--attempts=2"),
    *("--texts=1", "--tokens=6", "evaluation.methods.tree.drafter={name: selfspec}"),
]
TEMPLATE = """\
{% for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}
"""


FORMAT = """\
from falcon_lab import hookimpl
from falcon_lab.plugins.builtins import FalconConfig


def plain():
    from falcon_lab.interfaces import Exported, ExportFormat

    class Plain(ExportFormat):
        engines = "nothing"

        def write(self, drafter):
            others = {"notes.txt": b"a file more"}
            return Exported({"block": drafter.config.block}, dict(drafter.tensors), others)

        def read(self, exported, drafter):
            return exported.tensors

        def serving(self, folder, drafter):
            return folder

    return Plain()


@hookimpl
def register_components(register):
    build, formats = "falcon_lab.drafters.falcon:FalconDrafter", {"plain": plain}
    register.drafter("plain", build, config=FalconConfig, exports=formats)
"""
"""A plug-in: Falcon's drafter under another name, with a format."""


def install(site: Path) -> None:
    """Make the plug-in an installed one."""
    info = site / "falcon_lab_plain-1.dist-info"
    info.mkdir(parents=True)
    (site / "falcon_lab_plain.py").write_text(FORMAT)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: falcon-lab-plain\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[falcon_lab]\nplain = falcon_lab_plain\n")


def exporting(finished: Tree) -> Tree:
    """The target in a folder of its own, and a drafter for it that can be exported."""
    own = {n.removeprefix("out/"): c for n, c in finished.items() if n.startswith("out/drafter")}
    content = own["drafter/config.json"]
    assert content is not None
    config = json.loads(content)
    config["drafter"]["name"], config["target"]["name"] = "plain", "target"
    config["provenance"] |= {"name": "plain", "distribution": "falcon-lab-plain", "version": "1"}
    return {**targeted(finished), **own, "drafter/config.json": json.dumps(config).encode()}


def targeted(finished: Tree) -> Tree:
    """The target in a folder of its own."""
    [made] = [name for name in finished if re.fullmatch("cache/targets/small-code-[^.]*", name)]
    own = [name for name in finished if name == made or name.startswith(f"{made}/")]
    return {f"target{name.removeprefix(made)}": finished[name] for name in own}


def chatting(finished: Tree) -> Tree:
    """The target in a folder of its own, a chat template, and questions."""
    questions = "".join(json.dumps({"text": f"say {number}"}) + "\n" for number in range(40))
    return {
        "chat.jinja": TEMPLATE.encode(),
        "questions.jsonl": questions.encode(),
        **targeted(finished),
    }


def comparison() -> str:
    """The recipe as a comparison of two heads."""
    dropped = ("name: small", "out: out", "  methods:")
    lines = [line for line in RECIPE.splitlines() if not line.startswith(dropped)]
    return COMPARISON + "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arguments", "between", "disks", "most"),
    [
        (["run", "small.yaml"], 0.02, 200, 16),
        (["evaluate", "out", "tree.depth=3"], 0.02, 40, 8),
        (["compare", "both.yaml"], 0.1, 200, 8),
        (["tune", "out/drafter", *TUNE, *SHORT], 0.05, 12, 3),
        (["bench", "--drafter", "out/drafter", *BENCH, *SHORT], 0.02, 4, 4),
        (["dialogues", *DIALOGUES], 0.01, 20, 8),
        (["search", "small.yaml", *SEARCH], 0.02, 8, 2),
        (["new-plugin", "mine"], 0.002, 20, 12),
        (["export", "drafter", "exported", "--to", "plain"], 0.005, 15, 8),
        (["generate", "--drafter", "out/drafter", "--prompt", "def", *SHORT, LONGER], 0.005, 0, 1),
        (
            ["check", "--drafter", "out/drafter", "--prompts", "1", "--samples", "60", *SHORT],
            0.01,
            0,
            1,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_goes_on_from_every_interruption(
    server: Server,
    finished: Tree,
    arguments: list[str],
    between: float,
    disks: int,
    most: int,
) -> None:
    if arguments[0] == "search":
        pytest.importorskip("optuna")
    begin = BEGIN if arguments[0] == "run" else finished
    begin = {**begin, "both.yaml": comparison().encode()}
    if arguments[0] == "dialogues":
        begin |= chatting(finished)
    if arguments[0] == "export":
        begin |= exporting(finished)
    visit = server.visit(arguments, begin, FAULTS, between, most)
    counted = Counter(end.fault for end in visit.ends)
    assert not (found := complaints(visit, begin)), "\n".join(found)
    assert counted["kill"] + counted["torn"] >= 25, counted
    assert counted["full"] + counted["cut"] >= disks, counted
    if arguments[0] == "run":
        ended = {(end.place.partition(":")[0], end.fault) for end in visit.ends}
        assert ended >= {(stage, each) for stage in STAGES for each in SIGNALS}
