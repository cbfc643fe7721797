"""What a report and a model card say first, in words that the figures support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def headline(results: Mapping[str, Any]) -> str:
    """One sentence with the measured figure and no more than it supports."""
    name = results["headline"]
    target = (results["target"] or {}).get("name") or "the target"
    if name is None or results["methods"][name]["speedup"] is None:
        return f"No speed-up was measured for {target}."
    s = results["methods"][name]
    speedup = s["speedup"]
    text = f"{name} decodes {target} at {speedup['ratio']:.2f}× the speed of plain decoding"
    if speedup["low"] is None:
        return f"{text} on one prompt, which gives no interval."
    text += f" (95 % interval {speedup['low']:.2f}–{speedup['high']:.2f})"
    if not s["lossless"]:
        return f"{text}, with a lossy rule."
    if s["identical_share"] is None:
        return f"{text}, drawing from the target's own distribution."
    if s["identical_share"] < 1:
        return f"{text}, but not with the same output everywhere."
    return f"{text}, with the same output."


def hardware_sentence(results: Mapping[str, Any]) -> str:
    """Where the figures come from, in a line."""
    h, s = results["hardware"], results["methods"]
    machine = h.get("gpu") or f"{h['cpu']}, {h['threads']} of {h['cores']} cores"
    prompts = max((summary["prompts"] for summary in s.values()), default=0)
    evaluation = results["experiment"].get("evaluation") or {}
    temperature = evaluation.get("temperature") or 0
    mode = "greedy" if not temperature else f"temperature {temperature:g}"
    dtype = str(h.get("dtype") or "").removeprefix("torch.")
    return f"Measured on {machine}, {dtype}, one sequence at a time, {mode}, {prompts} prompts."
