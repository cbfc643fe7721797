"""YAML files that are no experiment, and values that no key takes."""

from __future__ import annotations

from bad_inputs.case import BadInput, write
from bad_inputs.prepared import COMPARISON, EXPERIMENT

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 9)}]\n" for depth in range(1, 9)
)
DEEP = 100_000

FILES = [
    ("a list", "- a list\n", "bad.yaml", "mapping"),
    ("a text alone", "experiment", "bad.yaml", "known: name"),
    ("a tab as indentation", "data:\n\tlength: 32\n", "bad.yaml:2", "YAML"),
    ("a bracket that does not close", "stages: [target\nseed: 1\n", "bad.yaml:2", "YAML"),
    ("a quote that does not close", "name: 'tiny\n", "bad.yaml", "YAML"),
    ("a colon too many", "name: a: b\n", "bad.yaml:1", "YAML"),
    ("two documents", "seed: 1\n---\nseed: 2\n", "bad.yaml", "YAML"),
    ("a key that is there twice", "seed: 1\nseed: 2\n", "bad.yaml:2", "seed"),
    ("an alias of nothing", "name: *tiny\n", "bad.yaml:1", "YAML"),
    ("an alias of itself", "evaluation: &a {methods: *a}\n", "bad.yaml", "nested"),
    ("a billion laughs", LAUGHS, "bad.yaml", "nested"),
    ("a Python object", "name: !!python/object/apply:os.getcwd []\n", "bad.yaml:1", "YAML"),
    ("a tag that nobody knows", "name: !secret tiny\n", "bad.yaml:1", "YAML"),
    ("a set", "stages: !!set {target, data}\n", "stages", "quote it"),
    ("a date as a seed", "seed: 2026-11-22\n", "bad.yaml:1", "whole number"),
    ("bytes as a name", "name: !!binary aGVsbG8=\n", "bad.yaml:1", "name"),
    ("a NUL", b"name: a\0b\n", "bad.yaml", "special characters"),
    ("another encoding", "name: caf\u00e9\n".encode("latin-1"), "bad.yaml", "UTF-8"),
    ("UTF-16", "name: tiny\n".encode("utf-16"), "bad.yaml", "UTF-8"),
    ("JSON cut short", '{"name": "tiny", "seed"', "bad.yaml:1", "YAML"),
    ("a program", "#!/bin/sh\necho hello; exit\n", "bad.yaml", "known: name"),
    ("a page of the web", "<!DOCTYPE html>\n<html></html>\n", "bad.yaml", "known: name"),
    ("a nesting of 100,000", "name: " + "[" * DEEP + "]" * DEEP + "\n", "bad.yaml", "deep"),
    ("a merge key of a text", "<<: tiny\nname: a\n", "bad.yaml:1", "YAML"),
    ("an integer as a key", "1: 2\n", "bad.yaml:1", "unknown key"),
    ("a list as a key", "? [a, b]\n: 2\n", "bad.yaml:1", "key"),
    ("an empty key", "'': 2\n", "bad.yaml", "unknown key"),
    ("a key in the wrong case", "Seed: 2\n", "bad.yaml:1", "did you mean 'seed'"),
    ("a key with dots", "tree.depth: 2\n", "bad.yaml:1", "unknown key"),
]
"""What is in the file; the place and a part of the advice."""

LINES = [
    ("trainer:\n", "trainer", "is empty"),
    ("data:\n", "data", "is empty"),
    ("target: null\n", "target", "is empty"),
    ("drafter:\n", "drafter", "is empty"),
    ("tree: null\n", "tree", "is empty"),
    ("evaluation: ~\n", "evaluation", "is empty"),
    ("wandb:\n", "wandb", "is empty"),
    ("report: []\n", "report", "mapping"),
    ("target: target\n", "target", "mapping"),
    ("tree: chain\n", "tree", "{name: chain}"),
    ("drafter: [falcon]\n", "drafter", "mapping"),
    ("data: 3\n", "data", "mapping"),
    ("data: {length: {}}\n", "data.length", "number"),
    ("data: {length: [3]}\n", "data.length", "number"),
    ("data: {length: true}\n", "data.length", "number"),
    ("data: {length: 3.5}\n", "data.length", "number"),
    ("data: {length: .inf}\n", "data.length", "number"),
    ("data: {lenght: 3}\n", "data.lenght", "did you mean 'length'"),
    ("data: {regenerate: 2}\n", "data.regenerate", "at most 1"),
    ("data: {batch_size: 0}\n", "data.batch_size", "at least 1"),
    ("data: {workers: -1}\n", "data.workers", "at least 0"),
    ("target: {dtype: float8}\n", "target.dtype", "float16"),
    ("target: {device: tpu}\n", "target.device", "auto"),
    ("target: {device: 'cuda:x'}\n", "target.device", "cuda:N"),
    ("target: {attention: fast}\n", "target.attention", "sdpa"),
    ("target: {lean: maybe}\n", "target.lean", "true or false"),
    ("target: {pretraining: {steps: 0}}\n", "target.pretraining.steps", "at least 1"),
    ("target: {pretraining: {model: {heads: 3}}}\n", "target.pretraining.model.heads", "divide"),
    ("target: {pretraining: {vocabulary: 100}}\n", "vocabulary", "at least 257"),
    ("target: {pretraining: []}\n", "target.pretraining", "mapping"),
    ("target: {pretraining: {corpse: a}}\n", "pretraining.corpse", "did you mean 'corpus'"),
    ("distillation: {optimizer: {lr: 0}}\n", "distillation.optimizer.lr", "more than 0"),
    ("distillation: {optimizer: {lr: .nan}}\n", "distillation.optimizer.lr", "more than 0"),
    ("distillation: {optimizer: {betas: [0.9]}}\n", "distillation.optimizer.betas", "two"),
    ("distillation: {optimizer: {betas: [0.9, 1]}}\n", "betas", "less than 1"),
    ("distillation: {optimizer: {betas: 0.9}}\n", "betas", "list"),
    ("distillation: {noise: .inf}\n", "distillation.noise", "at least 0"),
    ("distillation: {unroll: 0}\n", "distillation.unroll", "at least 1"),
    ("distillation: {own_features: 1.1}\n", "distillation.own_features", "at most 1"),
    ("distillation: {lr: 1}\n", "distillation.lr", "unknown key"),
    ("evaluation: {temperature: -1}\n", "evaluation.temperature", "it must be"),
    ("evaluation: {temperature: .nan}\n", "evaluation.temperature", "it must be"),
    ("evaluation: {temperature: .inf}\n", "evaluation.temperature", "it must be"),
    ("evaluation: {top_p: 0}\n", "evaluation.top_p", "more than 0"),
    ("evaluation: {top_k: -1}\n", "evaluation.top_k", "at least 0"),
    ("evaluation: {repeats: 0}\n", "evaluation.repeats", "at least 1"),
    ("evaluation: {stop: a}\n", "evaluation.stop", "[a]"),
    ("evaluation: {prompts: {limit: 0}}\n", "evaluation.prompts.limit", "at least 1"),
    ("evaluation: {prompts: heldout}\n", "evaluation.prompts", "mapping"),
    ("evaluation: {methods: [chain]}\n", "evaluation.methods", "mapping"),
    ("evaluation: {methods: {a: chain}}\n", "evaluation.methods.a", "mapping"),
    ("evaluation: {methods: {a: null}}\n", "evaluation.methods.a", "empty"),
    ("evaluation: {methods: {a: {tre: 1}}}\n", "evaluation.methods.a.tre", "'tree'"),
    ("evaluation: {methods: {a: {tree: chain}}}\n", "methods.a.tree", "mapping"),
    ("evaluation: {methods: {a: {tree: {name: c}}}}\n", "methods.a.tree.name", "known"),
    ("evaluation: {methods: {1: {}}}\n", "evaluation.methods.1", "quote"),
    ("evaluation: {methods: {plain: {}}}\n", "evaluation.methods.plain", "choose another"),
    ("evaluation: {methods: {Plain: {}}}\n", "evaluation.methods.Plain", "choose another"),
    ("evaluation: {methods: {HF generate: {}}}\n", "methods.HF generate", "choose another"),
    ("evaluation: {methods: {../../chats: {}}}\n", "../../chats", "files are called by it"),
    ("evaluation: {methods: {a/b: {}}}\n", "a/b", "files are called by it"),
    ("evaluation: {methods: {'a\\b': {}}}\n", "evaluation.methods", "files are called by it"),
    ("evaluation: {methods: {.hidden: {}}}\n", ".hidden", "files are called by it"),
    ("evaluation: {methods: {'': {}}}\n", "evaluation.methods", "files are called by it"),
    ("evaluation: {methods: {' a': {}}}\n", "evaluation.methods", "files are called by it"),
    ('evaluation: {methods: {"a\\nb": {}}}\n', "evaluation.methods", "files are called by it"),
    ('evaluation: {methods: {"a\\0b": {}}}\n', "bad.yaml", "control character"),
    (f"evaluation: {{methods: {{{'x' * 300}: {{}}}}}}\n", "evaluation.methods", "100 at most"),
    ("evaluation: {methods: {a: {acceptance: {name: gredy}}}}\n", "acceptance.name", "greedy"),
    (
        "evaluation: {methods: {a: {drafter_path: [a]}}}\n",
        "methods.a.drafter_path",
        "must be a text",
    ),
    ("evaluation: {methods: {a: {optional: perhaps}}}\n", "methods.a.optional", "true or false"),
    ("name: ''\n", "name", "files are called by it"),
    ("name: ../../climbed\n", "name", "files are called by it"),
    ("name: a/b\n", "name", "files are called by it"),
    (f"name: {'x' * 300}\n", "name", "100 at most"),
    ("name: [tiny]\n", "name", "bad.yaml:1"),
    ('out: "a\\0b"\n', "x00b", "NUL"),
    (f"out: {'x' * 300}\n", "xxx", "shorter name"),
    ("out: ${out}\n", "out", "Recursive"),
    ("out: ${nowhere}/a\n", "out", "nowhere"),
    ("out: ${oc.env:NO_SUCH_VARIABLE}\n", "out", "NO_SUCH_VARIABLE"),
    ("out: ${oc.create:a}\n", "out", "interpolation"),
    ("out: ${unknown_resolver:a}\n", "out", "unknown_resolver"),
    ("out: ${a\n", "out", "${a"),
    ("name: ${out}\nout: ${name}\n", "bad.yaml", "Recursive"),
    ("seed: ???\n", "seed", "give one"),
    ("seed: -1\n", "seed", "at least 0"),
    ("seed: 1e400\n", "seed", "whole number"),
    ("seed: one\n", "seed", "whole number"),
    ("seeds: 3\n", "seeds", "list"),
    ("seeds: [a]\n", "seeds", "whole number"),
    ("seeds: [-1]\n", "seeds", "at least 0"),
    ("stages: [train]\n", "stages", "distil"),
    ("stages: all\n", "stages", "list"),
    ("stages: [target, 1]\n", "stages", "distil"),
    ("tree: {name: chain, depth: -3}\n", "tree.depth", "at least"),
    ("tree: {name: null}\n", "tree.name", "known"),
    ("tree: {name: [chain]}\n", "tree.name", "chain"),
    ("tree: {depth: 3, width: 2}\n", "tree.width", "depth"),
    ("drafter: {name: falcon, block: 0}\n", "drafter.block", "at least 1"),
    ("drafter: {name: falcon, block: two}\n", "drafter.block", "whole number"),
    ("drafter: {name: falcon, fuse: both}\n", "drafter.fuse", "lstm"),
    ("drafter: {name: falcn}\n", "drafter.name", "'falcon'"),
    ("glancing: {name: csgd, rate: 7}\n", "glancing", "known"),
    ("glancing: {name: csg}\n", "glancing.name", "'csgd'"),
    ("objective: {name: falcon, weight: 1}\n", "objective.weight", "known"),
    ("objective: {name: ''}\n", "objective.name", "known"),
    ("controller: {name: confidence, threshold: 7}\n", "controller", "at most"),
    ("acceptance: {name: typical, epsilon: -1}\n", "acceptance", "known"),
    ("trainer: {max_step: 3}\n", "trainer.max_step", "'max_steps'"),
    ("trainer: {max_steps: many}\n", "trainer.max_steps", "int"),
    ("trainer: {max_steps: 0}\n", "trainer.max_steps", "at least 1"),
    ("trainer: {max_steps: -5}\n", "trainer.max_steps", "at least 1"),
    ("trainer: {max_epochs: x}\n", "trainer.max_epochs", "int"),
    ("trainer: {logger: true}\n", "trainer.logger", "wandb"),
    ("trainer: {callbacks: []}\n", "trainer.callbacks", "distillation"),
    ("trainer: {default_root_dir: a}\n", "trainer.default_root_dir", "out=FOLDER"),
    ("trainer: {gradient_clip_val: -1}\n", "trainer.gradient_clip_val", "at least"),
    ("trainer: [max_steps]\n", "trainer", "mapping"),
    ("decoding: {prefill_chunk: 0}\n", "decoding.prefill_chunk", "at least 1"),
    ("decoding: {kv_memory: 0}\n", "decoding.kv_memory", "more than 0"),
    ("decoding: {kv_memory: .inf}\n", "decoding.kv_memory", "more than 0"),
    ("decoding: {compile: some}\n", "decoding.compile", "drafter"),
    ("wandb: {mode: on}\n", "wandb.mode", "online"),
    ("wandb: {mode: dry}\n", "wandb.mode", "offline"),
    ("wandb: {tags: a}\n", "wandb.tags", "[a]"),
    ("wandb: {api_key: a}\n", "wandb.api_key", "unknown key"),
    ("report: {titel: 7}\n", "report.titel", "'title'"),
    ("heads: {a: {}}\n", "heads", "falcon-lab compare"),
    ("base: x.yaml\n", "base", "falcon-lab compare"),
    ("variants: {a: {}}\n", "variants.a", "list of overrides"),
    ("variants: {a: [3]}\n", "variants.a", "list of overrides"),
    ("variants: [a]\n", "variants", "mapping"),
    ("variants: {a: [depth]}\n", "variants.a", "="),
    ("variants: {a: [tree.dept=3]}\n", "tree.dept", "'depth'"),
    ("variants: {../a: []}\n", "variants", "files are called by it"),
    ("variants: {plain: []}\n", "variants", "choose another"),
    ("variants: {a: [seed=3]}\n", "variants.a.seed", "head"),
    ("data: {length: null}\n", "data.length", "null"),
    ("data: {corpus: null}\n", "data.corpus", "null"),
    ("evaluation: {prompts: {texts: [' ']}}\n", "evaluation.prompts.texts", "empty"),
    ("out: ''\n", "out", "folder"),
    ("out: null\n", "out", "null"),
    ("tree: {name: chain, depth: 1000000000}\n", "tree.depth", "at most"),
    ("drafter: {name: falcon, block: 1000000}\n", "drafter.block", "at most"),
    ("drafter: {name: falcon, layers: 10000000}\n", "drafter.layers", "at most"),
]
"""Lines that take the place of the experiment's own, the key, and a part of the advice."""

LATE = [
    ("trainer.num_nodes=0", "trainer.num_nodes", "1"),
    ("drafter.name=falcon drafter.heads=3", "drafter", "heads"),
    ("drafter.name=falcon drafter.taps=[99]", "drafter", "taps"),
    ("objective.soft=nan", "objective.soft", "at least 0"),
    ("evaluation.prompts.texts=['']", "evaluation.prompts.texts", "empty"),
    ("evaluation.temperature=1e-300", "evaluation.temperature", "0"),
]
"""What only looking at other files and keys shows, and must show before anything is trained."""

HEADS = [
    ("heads: [a]\n", "heads", "mapping"),
    ("heads: {a: 3}\n", "heads.a", "mapping"),
    ("heads: {a: null}\n", "heads.a", "empty"),
    ("heads: {a/b: {}}\n", "heads.a/b", "files are called by it"),
    ("heads: {plain: {}}\n", "heads.plain", "choose another"),
    ("heads: {'plain 2': {}}\n", "heads.plain 2", "choose another"),
    ("heads: {a: {drafte: {name: falcon}}}\n", "heads.a.drafte", "'drafter'"),
    ("heads: {a: {drafter: {name: falcn}}}\n", "heads.a.drafter", "'falcon'"),
    ("heads: {a: {drafter: {block: -1}}}\n", "heads.a.drafter.block", "at least 1"),
    ("heads: {a: {data: {length: 3}}}\n", "heads.a.data", "a head's own are"),
    ("heads: {a: {train: perhaps}}\n", "heads.a.train", "true or false"),
    ("heads: {a: {optional: 1}}\n", "heads.a.optional", "true or false"),
    ("heads: {a: {drafters_of: b}}\n", "heads.a.drafters_of", "no head"),
    ("heads: {a: {drafters_of: a}}\n", "heads.a.drafters_of", "no head"),
    ("heads: {a: {spend: 3}}\n", "heads.a.spend", "mapping"),
    ("heads: {a: {spend: {tree: {}}}}\n", "heads.a.spend.tree", "chain-"),
    ("heads: {a: {spend: {own: {}}}}\n", "heads.a.spend.own", "chain-"),
    ("heads: {a: {spend: {chain-2: {data: {}}}}}\n", "chain-2.data", "unknown key"),
    ("only: [nobody]\n", "only", "no head"),
    ("only: falcon\n", "only", "list"),
    ("budgets: []\n", "budgets", "at least one"),
    ("budgets: [chain-2, chain-2]\n", "budgets", "leave one out"),
    ("budgets: [chain]\n", "budgets[0]", "chain-"),
    ("budgets: [chain-0]\n", "budgets[0]", "chain-"),
    ("budgets: chain-2\n", "budgets", "list"),
    ("temperatures: [.nan]\n", "temperatures", "it must be"),
    ("temperatures: [.inf]\n", "temperatures", "it must be"),
    ("temperatures: [-1]\n", "temperatures", "it must be"),
    ("temperatures: [0, 0]\n", "temperatures", "leave one out"),
    ("temperatures: []\n", "temperatures", "at least one"),
    ("temperatures: [warm]\n", "temperatures", "number"),
    ("tuning: {grid: []}\n", "tuning", "budgets"),
    ("tuning: {grid: [best]}\n", "tuning", "best"),
    ("tuning: {prompts: 0}\n", "tuning", "at least"),
    ("tuning: 3\n", "tuning", "mapping"),
    ("paper: 3\n", "paper", "mapping"),
    ("paper: {figures: 3}\n", "paper.figures", "unknown key"),
    ("base: nowhere.yaml\n", "nowhere.yaml", "no such file"),
    ("base: heads.yaml\n", "base", "itself"),
    ("base: [x.yaml]\n", "base", "name of a YAML"),
    ("base: ''\n", "folder", "name an experiment"),
    ("base: runs\n", "runs", "YAML"),
    ("name: ../../climbed\n", "name", "files are called by it"),
    ("out: x.yaml\n", "x.yaml", "a file stands where a folder"),
]
"""Lines that take the place of the comparison's own."""


def with_lines(whole: str, own: str) -> str:
    """A YAML with lines of one's own in place of those of the same keys."""
    keys = {line.partition(":")[0] for line in own.splitlines()}
    kept: list[str] = []
    keep = True
    for line in whole.splitlines(keepends=True):
        keep = keep if line.startswith(" ") else line.partition(":")[0] not in keys
        kept += [line] * keep
    return own + "".join(kept)


def title(text: str) -> str:
    """The lines as a name."""
    return " | ".join(text.split("\n"))[:70].removesuffix(" | ")


CASES = [
    *(
        BadInput(f"a YAML with {what}", "run bad.yaml", place, remedy, write("bad.yaml", content))
        for what, content, place, remedy in FILES
    ),
    *(
        BadInput(
            title(own),
            "run bad.yaml",
            place,
            remedy,
            write("bad.yaml", with_lines(EXPERIMENT.replace("name: tiny", "name: fresh"), own)),
        )
        for own, place, remedy in LINES
    ),
    *(
        BadInput(words, ["run", "x.yaml", "out=runs/fresh", *words.split()], place, remedy)
        for words, place, remedy in LATE
    ),
    *(
        BadInput(
            f"compare: {title(own)}",
            "compare heads.yaml",
            place,
            remedy,
            write("heads.yaml", with_lines(COMPARISON, own)),
        )
        for own, place, remedy in HEADS
    ),
]
