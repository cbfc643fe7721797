"""Hold the decoding speed of this checkout against that of another one, say of a commit before.

    git worktree add /some/folder COMMIT
    python benchmarks/regression.py /some/folder runs/csgd/drafter [KEY=VALUE]...

Both checkouts decode the same prompts with the same saved drafter, each in a process of its own
that stays alive, so that they take turns: one prompt here, the same prompt there, and the other
way round the next time. Ways: ``plain``, ``chain``, ``tree`` and ``dynamic`` through the target's
modules, ``lean`` (the tree through the short forward pass), ``batch`` (the tree for four sequences
side by side), and with ``compiled=true`` also ``compiled-plain`` and ``compiled-tree``.

Keys: ``repeats`` (turns of every prompt, 10), ``tokens`` (of an answer, 64), ``ways``
(a comma-separated list), ``compiled`` (false), ``seed`` (of the bootstrap, 0).

Printed for each way: the median over prompts and repeats of old seconds divided by new seconds,
with a 95 % bootstrap interval, by the wall clock and by the CPU time of the process; above 1 this
checkout is faster. Texts that differ are an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from falcon_bench.scripts import pairs

HERE = Path(__file__).parents[1]
WAYS = ("plain", "chain", "tree", "dynamic", "lean", "batch")
COMPILED_WAYS = ("compiled-plain", "compiled-tree")
SIDE_BY_SIDE = 4
NODES: dict[str, dict[str, Any]] = {
    "chain": {"name": "chain", "depth": 6},
    "tree": {"name": "static", "template": "auto"},
    "dynamic": {"name": "dynamic", "nodes": 10, "beam": 2, "depth": 6},
}
PROMPTS = (
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def largest(rows, limit):\n    found = None\n    for row in rows:\n        if row > limit:\n",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n",
    "def mean(numbers):\n    if not numbers:\n        return 0\n    total = sum(numbers)\n",
    "def merge(left, right):\n    merged = []\n    while left and right:\n",
)
MOVED = {
    "load_experiment": ("falcon_lab.config.load", "falcon_lab.config"),
    "load_components": ("falcon_lab.plugins.discovery", "falcon_lab.plugins"),
    "ensure_target": ("falcon_lab.pretraining.target", "falcon_lab.targets.builtin"),
    "BuildContext": ("falcon_lab.interfaces", "falcon_lab.protocols"),
    "PlainEngine": ("falcon_lab.decoding.plain", "falcon_lab.decoding.baseline"),
    "Sampling": ("falcon_lab.sampling", "falcon_lab.decoding.sampling"),
}
"""What had another module at commit 5f29856, the first that this script is meant for."""


def find(name: str) -> Any:
    """Return what a checkout calls by this name, wherever its module is."""
    for module in MOVED[name]:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"neither of {', '.join(MOVED[name])} has {name}")


# --- one checkout, in a process of its own ------------------------------------------------------


class Worker:
    """Decode with one checkout, one way and one prompt at a time.

    Args:
        drafter: a saved drafter's folder.
        tokens: most tokens of an answer.
    """

    def __init__(self, drafter: Path, tokens: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._folder = drafter
        self._tokens = tokens
        self._ways: dict[str, Callable[[int], list[list[int]]]] = {}
        from falcon_lab.decoding.stopping import StopCondition

        self._plain_target = self._target("")
        tokenizer = self._plain_target.tokenizer
        self._prompts = [torch.tensor(tokenizer(text)["input_ids"]) for text in PROMPTS]
        self._stop = StopCondition(self._plain_target.eos_ids, [], tokenizer)

    def run(self, way: str, prompt: int) -> dict[str, Any]:
        """Decode; return the seconds that it took and what was written."""
        if way not in self._ways:
            self._ways[way] = self._made(way)
            self._ways[way](prompt)
        wall, cpu = time.perf_counter(), time.process_time()
        texts = self._ways[way](prompt)
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "texts": texts,
        }

    def _made(self, way: str) -> Callable[[int], list[list[int]]]:
        compiled, _, name = way.rpartition("-")
        target = self._target("target.lean=true" if name == "lean" else "")
        if compiled:
            target = target.compiled(lambda line: None)
        if name == "plain":
            engine = find("PlainEngine")(target)
        else:
            engine = self._speculative(target, NODES.get(name, NODES["tree"]), bool(compiled))
        return self._several(engine) if name == "batch" else self._single(engine)

    def _single(self, engine: Any) -> Callable[[int], list[list[int]]]:
        def decode(prompt: int) -> list[list[int]]:
            found = engine.generate(
                self._prompts[prompt], generator=self._generator(), **self._settings()
            )
            return [found.tokens]

        return decode

    def _several(self, engine: Any) -> Callable[[int], list[list[int]]]:
        def decode(prompt: int) -> list[list[int]]:
            chosen = [self._prompts[(prompt + i) % len(PROMPTS)] for i in range(SIDE_BY_SIDE)]
            settings = self._settings() | {"generators": [self._generator() for _ in chosen]}
            if hasattr(engine, "generate_batch"):
                found = engine.generate_batch(chosen, batch_size=SIDE_BY_SIDE, **settings)
            else:
                batched = import_module("falcon_lab.decoding.batch_engine").BatchEngine
                found = batched(engine, SIDE_BY_SIDE).generate(chosen, **settings)
            return [one.tokens for one in found]

        return decode

    def _settings(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self._tokens,
            "sampling": find("Sampling")(),
            "stop": self._stop,
        }

    def _generator(self) -> Any:
        return self._torch.Generator().manual_seed(0)

    def _target(self, override: str) -> Any:
        described = json.loads((self._folder / "config.json").read_text("utf-8"))["target"]
        known = [f"target.name={json.dumps(described['name'])}", override]
        experiment = find("load_experiment")(None, [word for word in known if word])
        return find("ensure_target")(experiment.target, lambda line: None)

    def _speculative(self, target: Any, tree: dict[str, Any], compiled: bool) -> Any:
        from falcon_lab.decoding.engine import SpeculativeEngine
        from falcon_lab.drafters.saved import load_drafter

        components = find("load_components")()
        drafter = load_drafter(self._folder, target, components)
        if compiled:
            drafter = drafter.compiled(lambda line: None)
        context = find("BuildContext").of(target, drafter)
        return SpeculativeEngine(
            target,
            drafter,
            components.build("tree_builder", tree, context),
            components.build("acceptance_rule", {"name": "auto"}, context),
            components.build("controller", {"name": "fixed"}, context),
        )


def work(drafter: Path, tokens: int) -> None:
    """Answer lines ``{"way": …, "prompt": …}`` on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to standard error
    worker = Worker(drafter, tokens)
    for line in sys.stdin:
        print(json.dumps(worker.run(**json.loads(line))), file=answers, flush=True)


# --- both checkouts, in turns -------------------------------------------------------------------


class Checkout:
    """A process that decodes with the code of one checkout."""

    def __init__(self, folder: Path, drafter: Path, tokens: int) -> None:
        sources = [folder / "src", *sorted(folder.glob("plugins/*/src"))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, __file__, "--worker", str(drafter), str(tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=folder
        )

    def run(self, way: str, prompt: int) -> dict[str, Any]:
        """Decode one prompt one way."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"way": way, "prompt": prompt}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{way}: the process of one checkout has ended; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(old: Checkout, new: Checkout, way: str, repeats: int) -> dict[str, list[float]]:
    """Return old seconds over new seconds of every turn, by the wall clock and by CPU time.

    Raises:
        SystemExit: the checkouts write different texts.
    """
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    for turn in range(repeats):
        for prompt in range(len(PROMPTS)):
            order = [old, new] if (turn + prompt) % 2 == 0 else [new, old]
            answers = {id(side): side.run(way, prompt) for side in order}
            before, after = answers[id(old)], answers[id(new)]
            if before["texts"] != after["texts"]:
                raise SystemExit(f"{way}, prompt {prompt}: the texts differ")
            for clock, found in ratios.items():
                found.append(before[clock] / after[clock])
    return ratios


def interval(ratios: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    values = np.asarray(ratios)
    dice = np.random.default_rng(seed)
    medians = np.median(dice.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def main(arguments: Sequence[str]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Compare the checkouts; print and return the ratios of every way."""
    if len(arguments) < 2:
        raise SystemExit(f"which checkout and which drafter? see the top of {__file__}")
    folder, drafter = (Path(word).resolve() for word in arguments[:2])
    keys = pairs(arguments[2:])
    ways = WAYS + (COMPILED_WAYS if keys.get("compiled") == "true" else ())
    ways = tuple(keys["ways"].split(",")) if "ways" in keys else ways
    tokens, repeats = int(keys.get("tokens", 64)), int(keys.get("repeats", 10))
    old, new = (Checkout(side, drafter, tokens) for side in (folder, HERE))
    found = {}
    print(f"{'way':16}{'wall':>24}{'CPU':>24}   turns")
    for way in ways:
        ratios = compare(old, new, way, repeats)
        found[way] = {
            clock: interval(taken, int(keys.get("seed", 0))) for clock, taken in ratios.items()
        }
        shown = ["{:.3f} [{:.3f}, {:.3f}]".format(*found[way][clock]) for clock in ("wall", "cpu")]
        print(f"{way:16}{shown[0]:>24}{shown[1]:>24}   {len(ratios['wall'])}", flush=True)
    old.close()
    new.close()
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1:])
