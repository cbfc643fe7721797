"""A folder with everything that commands take: each bad input spoils a copy of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from running import run
from tiny_models import save_tiny

EXPERIMENT = """\
name: tiny
target: {name: target, device: cpu}
data:
  corpus: generated
  documents: 3
  length: 32
  batch_size: 2
  validation: 1
  feature_store: store
distillation: {checkpoint_every: 2}
trainer:
  max_steps: 2
  accelerator: cpu
  enable_progress_bar: false
  log_every_n_steps: 1
evaluation:
  prompts: {limit: 1, prompt_tokens: 8}
  max_new_tokens: 4
  repeats: 1
  hf_generate: false
  threads: 1
  methods:
    chain: {tree: {name: chain, depth: 2}}
wandb: {mode: disabled}
report: {html: false}
"""

COMPARISON = """\
base: x.yaml
name: heads
out: runs/heads
seeds: [0]
budgets: [chain-2]
heads:
  falcon: {drafter: {name: falcon, block: 2}}
  linear: {drafter: {name: falcon, block: 1, fuse: linear}}
"""

FRAGMENT = """\
tree: {name: static, template: k2-10-d8}
controller: {name: fixed}
"""

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

CHATS = [
    [{"role": "user", "content": f"a b {word}"}, {"role": "assistant", "content": f"{word} c d"}]
    for word in "efghijkl"
]
PROMPTS = [{"question_id": number, "category": "a", "turns": ["a b c d"]} for number in (1, 2)]


def lines(records: list[dict[str, Any]]) -> str:
    """Records as JSONL."""
    return "".join(json.dumps(record) + "\n" for record in records)


def prepare(folder: Path) -> None:
    """Make the folder, which is the current one: an experiment, two runs, a comparison, data."""
    save_tiny(folder / "target")
    (folder / "x.yaml").write_text(EXPERIMENT, "utf-8")
    (folder / "heads.yaml").write_text(COMPARISON, "utf-8")
    (folder / "tuned.yaml").write_text(FRAGMENT, "utf-8")
    (folder / "template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "chats.jsonl").write_text(lines([{"messages": chat} for chat in CHATS]), "utf-8")
    (folder / "prompts.jsonl").write_text(lines(PROMPTS), "utf-8")
    (folder / "corpus").mkdir()
    for name in "abcdef":
        (folder / "corpus" / f"{name}.txt").write_text(f"{name} b c d\n" * 40, "utf-8")
    run("run", "x.yaml")
    run("run", "x.yaml", "out=runs/other", "seed=1", "stages=[target, data, distil]")
    shutil.copytree("runs/tiny/drafter", "shared")
    run("compare", "runs/tiny", "runs/other", "out=runs/compare", "budgets=[chain-2]")
