"""A comparison small enough for tests, and one whose figures are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from falcon_lab.measure.records import Record
from falcon_lab.studies.compare.drafters import EngineKey
from falcon_lab.studies.compare.measuring import Measured
from falcon_lab.studies.compare.plan import NodeBudget
from measuring import HEADER, TARGET, row
from tiny_models import save_tiny

RECIPE = """\
name: tiny
out: FOLDER/out
target: {name: FOLDER/target, device: cpu}
data: {corpus: generated, documents: 12, length: 64, batch_size: 2, validation: 1}
distillation: {checkpoint_every: 1}
trainer: {max_steps: 3, accelerator: cpu, enable_progress_bar: false, log_every_n_steps: 1}
evaluation:
  prompts: {limit: 2, prompt_tokens: 12}
  max_new_tokens: 10
  repeats: 1
  threads: 1
wandb: {mode: disabled}
seeds: [0, 1]
temperatures: [0, 1]
budgets: [chain-2, tree-4, best]
tuning: {prompts: 1, grid: [own, chain-2]}
heads:
  csgd: {drafter: {name: falcon, block: 2}, glancing: {name: csgd}}
  linear:
    drafter: {name: falcon, block: 1, fuse: linear}
    glancing: {name: none}
    tree: {name: chain, depth: 3}
    spend: {chain-2: {tree: {name: chain, depth: 3}}}
  lookup:
    optional: true
    train: false
    drafter: {name: lookup}
    spend: {tree-4: {drafter: {num_tokens: 3}, tree: {name: chain, depth: 3}}}
  gone: {optional: true, drafter: {name: gone}}
"""


def save_recipe(folder: Path, more: str = "") -> Path:
    """The tiny comparison and its target in a folder; the YAML."""
    save_tiny(folder / "target")
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)) + more)
    return path


def rows(name: str, walls: list[float], accepted: list[int], **more: Any) -> list[Record]:
    """An engine's records: one a prompt, with rounds that accept the given numbers of tokens."""
    tokens = list(range(1 + sum(a + 1 for a in accepted)))
    return [
        row(name, f"p{place}", wall=wall, accepted=accepted, tokens=tokens, **more)
        for place, wall in enumerate(walls)
    ]


def measured(temperature: float = 0.0, prompt_set: str = "heldout") -> Measured:
    """Two heads with one budget and two seeds.

    ``fast`` takes a quarter and a half of plain decoding's time with its seeds, ``slow`` all of it.
    """
    walls = [4.0, 8.0]
    identical = True if temperature == 0 else None
    cells = {
        EngineKey("fast", "chain-2", 0): rows("a", [1.0, 2.0], [2, 2, 0], identical=identical),
        EngineKey("fast", "chain-2", 1): rows("b", [2.0, 4.0], [2, 0, 0, 0], identical=identical),
        EngineKey("slow", "chain-2", 0): rows("c", walls, [0, 0, 0, 0, 0, 0], identical=identical),
    }
    cells[EngineKey("slow", "chain-2", 1)] = cells[EngineKey("slow", "chain-2", 0)]
    return Measured(
        prompt_set,
        temperature,
        rows("plain", walls, [0] * 6, depth=0),
        cells,
        dict.fromkeys(cells, True),
        {"fast": NodeBudget("chain-2", 2), "slow": NodeBudget("own")},
        {"fast": {"chain-2": 5.0, "own": 4.0}, "slow": {"chain-2": 1.0, "own": 2.0}},
        {cell: 2**20 for cell in cells if cell.seed == 0},
        "rows/compare-1.jsonl",
    )


def results(*found: Measured, **changes: Any) -> dict[str, Any]:
    """What a comparison's JSON holds."""
    from falcon_lab.studies.compare import figures

    found = found or (measured(), measured(1.0))
    heads = {
        name: {
            "drafter": {"name": name},
            "block": 2,
            "parameters": 1234567,
            "trainings": [
                {"seed": seed, "folder": "f", "steps": 5, "tokens": 4096, "seconds": 7.0}
                for seed in (0, 1)
            ],
            "components": {},
            "budgets": {"chain-2": f"{name}, k=2, chain depth 2"},
            "best": {
                "0": {"budget": "chain-2", "label": "chain", "tokens_per_second": {"chain-2": 5.0}}
            },
        }
        for name in ("fast", "slow")
    }
    return {
        "schema": 2,
        "name": "tiny",
        "date": "2026-11-21T12:00:00+00:00",
        "command": "falcon-lab compare tiny.yaml",
        "experiment": {"name": "tiny", "report": {"title": None}},
        "comparison": {"budgets": ["chain-2"]},
        "versions": {"python": "3.11"},
        "hardware": HEADER["hardware"],
        "git": None,
        "target": TARGET,
        "protocol": {
            "prompts": {m.prompt_set: 2 for m in found},
            "repeats": 1,
            "warmup": 1,
            "baselines": 2,
            "rows": {},
        },
        "left_out": {},
        "heads": heads,
        "plain": [figures.plain(m) for m in found],
        "rows": [r for m in found for r in figures.rows(m)],
        "pairs": [p for m in found for p in figures.pairs(m)],
        "paper": None,
        **changes,
    }
