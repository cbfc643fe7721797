"""Command lines that no command can make sense of."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from bad_inputs.case import BadInput

GOOD = {
    "run": "run x.yaml",
    "evaluate": "evaluate runs/tiny",
    "compare": "compare heads.yaml",
    "generate": "generate --target target --prompt 'a b'",
    "check": "check --drafter runs/tiny/drafter",
    "bench": "bench --drafter runs/tiny/drafter",
    "tune": "tune runs/tiny/drafter",
    "view-data": "view-data x.yaml",
}
"""Commands that take overrides, as they would be right."""

OVERRIDES = [
    ("an unknown key", "tree.dept=3", "tree.dept", "did you mean 'depth'"),
    ("an unknown section", "optimiser.lr=1", "optimiser", "unknown key"),
    ("an override without =", "tree.depth", "tree.depth", "write tree.depth=value"),
    ("an option that there is not", "--frobnicate", "--frobnicate", "=value"),
    ("an override without a key", "=3", "'=3'", "before the '='"),
    ("an override with an empty part", "tree..depth=3", "tree..depth", "before the '='"),
    ("a value that is no YAML", "stages=[target", "stages=[target", "cannot be read"),
    ("a value of another type", "seed=soon", "seed", "whole number"),
    ("a number that is out of range", "data.length=-4", "data.length", "at least 2"),
    ("a missing file of overrides", "nowhere.json", "nowhere.json", "no JSON file"),
    ("a missing part of a YAML", "nowhere.yaml", "nowhere.yaml", "no such file"),
    ("an interpolation of nothing", "name=${nothing}", "name", "nothing"),
    ("an interpolation of the environment", "wandb.group=${oc.env:NO_SUCH}", "group", "NO_SUCH"),
    ("a component that there is not", "tree.name=chian", "tree.name", "did you mean 'chain'"),
    ("an option of another component", "tree.name=chain tree.beam=3", "tree.beam", "known"),
    ("an argument that Lightning lacks", "trainer.max_step=3", "trainer.max_step", "max_steps"),
    ("two files of which one is missing", "tuned.yaml tuned2.yaml", "tuned2.yaml", "no such file"),
]


def overrides() -> Iterator[BadInput]:
    """Every wrong override, for every command that takes overrides."""
    for command, good in GOOD.items():
        for what, words, place, remedy in OVERRIDES:
            line = [*shlex.split(good), *words.split()]
            yield BadInput(f"{command}: {what}", line, place, remedy)


USAGE = [
    ("plugins --frobnicate", "--frobnicate", "--help"),
    ("plugins tree", "tree", "--help"),
    ("doctor --json", "--json", "--help"),
    ("doctor now", "now", "--help"),
    ("new-plugin", "NAME", "--help"),
    ("new-plugin mine --kind drfater", "drfater", "drafter"),
    ("new-plugin mine yours", "yours", "--help"),
    ("new-plugin mine --frobnicate", "--frobnicate", "--help"),
    ("new-plugin ''", "name", "letter"),
    ("new-plugin ../mine", "../mine", "letter"),
    ("new-plugin 3mine", "3mine", "letter"),
    ("new-plugin class", "class", "take no word of the language"),
    ("new-plugin falcon", "falcon", "choose"),
    ("rum x.yaml", "rum", "--help"),
    ("--frobnicate", "--frobnicate", "--help"),
    ("run", "YAML", "--help"),
    ("run --", "YAML", "--help"),
    ("run --dry-run", "YAML", "--help"),
    ("run nowhere.yaml", "nowhere.yaml", "name an experiment's YAML"),
    ("run nowhere", "nowhere", "name an experiment's YAML"),
    ("run .", ".", "name an experiment's YAML"),
    ("run corpus", "corpus", "name an experiment's YAML"),
    ("run runs/tiny", "runs/tiny", "name"),
    ("run chats.jsonl", "chats.jsonl", "YAML"),
    ("run seed=3", "seed=3", "name an experiment's YAML"),
    ("run x.yaml x.yaml y.yaml", "y.yaml", "no such file"),
    ("run x.yaml/y.yaml", "x.yaml/y.yaml", "name an experiment's YAML"),
    ("evaluate", "YAML", "--help"),
    ("evaluate nowhere", "nowhere", "name a saved drafter, a run or a YAML"),
    ("evaluate .", ".", "drafter"),
    ("evaluate corpus", "corpus", "drafter"),
    ("evaluate runs", "runs", "drafter"),
    ("evaluate runs/compare", "runs/compare", "drafter"),
    ("evaluate chats.jsonl", "chats.jsonl", "YAML"),
    ("evaluate heads.yaml", "heads.yaml", "compare"),
    ("evaluate x.yaml seeds=[1,2]", "x.yaml", "falcon-lab compare"),
    ("compare", "YAML", "--help"),
    ("compare nowhere", "nowhere", "run"),
    ("compare nowhere.yaml", "nowhere.yaml", "no such file"),
    ("compare x.yaml", "heads", "head"),
    ("compare corpus", "corpus", "run"),
    ("compare runs/tiny nowhere", "nowhere", "run"),
    ("compare runs/tiny runs/tiny", "runs/tiny", "another name"),
    ("compare runs/tiny chats.jsonl", "chats.jsonl", "run"),
    ("compare runs/tiny heads.yaml", "heads", "unknown"),
    ("generate --target target --prompt ''", "prompt", "give --prompt TEXT"),
    ("generate --target target", "prompt", "give --prompt TEXT"),
    ("generate --target '' --prompt a", "target.name", "name"),
    ("generate --target nowhere/at/all --prompt a", "nowhere/at/all", "folder"),
    ("generate --target corpus --prompt a", "corpus", "config.json"),
    ("generate --target target --prompt a --temperature hot", "--temperature", "--help"),
    ("generate --target target --prompt a --temperature=-1", "temperature", "at least 0"),
    ("generate --target target --prompt a --temperature nan", "temperature", "at least 0"),
    ("generate --target target --prompt a --max-new-tokens 0", "max_new_tokens", "at least 1"),
    ("generate --target target --prompt a --max-new-tokens 1.5", "--max-new-tokens", "--help"),
    ("generate --target target --prompt a --seed=-1", "seed", "at least 0"),
    ("generate --target target --prompt a --drafter nowhere", "nowhere", "drafter"),
    ("generate --target target --prompt a --tree nowhere", "tree.name", "known"),
    ("check --target target", "drafter", "--drafter DIR"),
    ("check --target target --samples 3", "--samples", "20"),
    ("check --target target --prompts 0", "--prompts", "--help"),
    ("check --drafter nowhere", "nowhere", "drafter"),
    ("bench --target target --method nothing", "nothing", "--help"),
    ("bench --target target --method hf-assisted", "hf-assisted", "--assistant MODEL"),
    ("bench --target target --batch-sizes 0", "--batch-sizes", "at least 1"),
    ("bench --target target --batch-sizes two", "--batch-sizes", "as in 1,4,8"),
    ("bench --target target --batch-sizes 1,", "--batch-sizes", "as in 1,4,8"),
    ("bench --target target --batch-sizes 1 --profile p.json", "--batch-sizes", "leave out"),
    (
        "bench evaluation.prompts.limit=1 evaluation.repeats=1 --target target --json corpus",
        "corpus",
        "--help",
    ),
    ("bench --target target --profile corpus", "corpus", "--help"),
    ("bench --target target --tree chain", "--tree", "--drafter DIR"),
    ("bench --drafter runs/tiny/drafter --tree nowhere", "nowhere", "known"),
    ("bench --drafter runs/tiny/drafter --tree nowhere.yaml", "nowhere.yaml", "no such file"),
    ("bench --drafter runs/tiny/drafter --tree chain,deep=3", "deep", "depth"),
    ("tune", "drafter", "--help"),
    ("tune nowhere", "nowhere", "drafter"),
    ("tune x.yaml", "x.yaml", "drafter"),
    ("tune runs/tiny/drafter --texts 1", "--texts", "2"),
    ("tune runs/tiny/drafter --nodes 0", "--nodes", "--help"),
    ("tune runs/tiny/drafter --depth zero", "--depth", "--help"),
    ("tune runs/tiny/drafter --into x.yaml", "x.yaml", "--help"),
    ("tune runs/tiny/drafter --tree nowhere", "nowhere", "known"),
    ("view-data", "corpus", "--help"),
    ("view-data nowhere target.name=target", "nowhere", "generated"),
    ("view-data nowhere.yaml", "nowhere.yaml", "no such file"),
    ("view-data x.yaml --samples 0", "--samples", "--help"),
    ("view-data x.yaml --samples many", "--samples", "--help"),
    ("view-data prompts.jsonl target.name=target", "prompts.jsonl:1", "text"),
    ("view-data target/model.safetensors target.name=target", "model.safetensors", "UTF-8"),
    ("view-data runs target.name=target", "runs", "text"),
]
"""Command line, what must be named, and a part of what must be advised."""

CASES = [
    *overrides(),
    *(BadInput(words, words, place, remedy) for words, place, remedy in USAGE),
]
