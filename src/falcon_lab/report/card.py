"""The model card (``README.md``) of a saved drafter, from what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from falcon_lab.measure.metrics import DEFINITIONS
from falcon_lab.report.sentences import hardware_sentence, headline
from falcon_lab.studies.evaluate import (
    NOTHING,
    identical_text,
    name_of,
    number,
    speedup_text,
    warnings,
)

RECIPE = ("data", "drafter", "glancing", "objective", "distillation", "trainer", "seed")


def drafter_card(results: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str:
    """Markdown with a YAML head that the Hugging Face hub reads.

    Args:
        results: the content of ``results.json``; None before anything was measured.
        config: the saved drafter's ``config.json``: ``drafter`` (its node), ``provenance`` and
            ``target`` (``name``, ``fingerprint``).
    """
    target, node = config["target"], config["drafter"]
    parts = [
        _front_matter(target),
        f"# {node['name']} drafter for {target['name']}",
        "A drafter for speculative decoding: it proposes tokens, the target checks them. It is of "
        f"use with `{target['name']}` alone.",
        _target(target, config.get("provenance") or {}),
        _measured(results),
        _loading(target),
        _recipe(results, node),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(target: Mapping[str, Any]) -> str:
    base = f"base_model: {json.dumps(target['name'])}\n" if "/" in str(target["name"]) else ""
    return f"---\nlibrary_name: falcon-lab\n{base}tags: [speculative-decoding, drafter]\n---"


def _target(target: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    lines = [f"- target: `{target['name']}`"]
    if target.get("revision"):
        lines.append(f"- target revision: `{target['revision']}`")
    lines.append(f"- target fingerprint: `{target['fingerprint']}`")
    if provenance:
        lines.append(
            f"- component: `{provenance.get('name')}` of `{provenance.get('distribution')}` "
            f"{provenance.get('version')}"
        )
    return "\n".join(lines)


def _measured(results: Mapping[str, Any] | None) -> str:
    if results is None:
        return "## Measured\n\nNothing has been measured yet: run the evaluate stage."
    head = "| method | tokens/s | speed-up [95 %] | τ | τ draft | α | identical |"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|"]
    for name, s in results["methods"].items():
        cells = (
            name_of(name, s),
            number(s["tokens_per_second"], 1),
            speedup_text(s["speedup"]),
            number(s["tau"], 2),
            number(s["tau_draft"], 2),
            NOTHING if s["alpha"] is None else f"{100 * s['alpha']:.1f} %",
            identical_text(s),
        )
        lines.append(f"| {' | '.join(cells)} |")
    notes = "\n".join(f"> **Note.** {line}" for line in warnings(results))
    shown = ("speedup", "tau", "tau_draft", "alpha")
    names = {"speedup": "speed-up", "tau": "τ", "tau_draft": "τ draft", "alpha": "α"}
    meaning = "\n".join(f"- {names[key]}: {DEFINITIONS[key]}" for key in shown)
    return "\n\n".join(
        part
        for part in (
            "## Measured",
            f"{headline(results)} {hardware_sentence(results)}",
            notes,
            "\n".join(lines),
            meaning,
            _how(results),
        )
        if part
    )


def _how(results: Mapping[str, Any]) -> str:
    evaluation = results["experiment"].get("evaluation") or {}
    prompts = (evaluation.get("prompts") or {}).get("name")
    versions = results["versions"]
    return (
        f"Measured on {results['date'][:10]} with prompts `{prompts}`, at most "
        f"{evaluation.get('max_new_tokens')} new tokens, {results['protocol']['repeats']} timed "
        f"passes after a warm-up, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, falcon-lab {versions['falcon-lab']}, by "
        f"`{results['command']}`."
    )


def _loading(target: Mapping[str, Any]) -> str:
    return f"""## Load it

```python
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.plugins.discovery import load_components
from falcon_lab.config.schema import TargetConfig
from falcon_lab.pretraining.target import ensure_target

target = ensure_target(TargetConfig(name={json.dumps(target["name"])}))
drafter = load_drafter("path/to/this/folder", target, load_components())
```

or measure it where you are: `falcon-lab evaluate path/to/this/folder`. It refuses a target with
another fingerprint unless it is forced."""


def _recipe(results: Mapping[str, Any] | None, node: Mapping[str, Any]) -> str:
    recipe: dict[str, Any] = {"drafter": dict(node)}
    if results is not None:
        recipe = {key: results["experiment"][key] for key in RECIPE if key in results["experiment"]}
    text = json.dumps(recipe, indent=2, ensure_ascii=False, default=str)
    return f"## Recipe\n\n```json\n{text}\n```"
