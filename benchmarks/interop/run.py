"""Prove that exported drafters do in other engines what they do here; see README.md.

python benchmarks/interop/run.py WORK [vllm=PYTHON] [speculators=PYTHON] [heads=eagle3,sps]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
VERIFIER = ["verifier_lm_head.weight", "verifier_norm.weight"]


def call(python: str, script: str, *arguments: str) -> None:
    """Run a script in an environment of its own, without this one's modules."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    subprocess.run([python, str(HERE / script), *arguments], check=True, env=environment)


def in_speculators(python: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what speculators found, and what does not hold."""
    out = case.with_name("speculators.json")
    call(python, "in_speculators.py", str(case), str(out))
    found = json.loads(out.read_text("utf-8"))
    right, wrong = found["speculators"], found["speculators-wrong"]
    checks = {
        "unexpected tensors": not right["unexpected"],
        "missing are the verifier's two": right["missing"] == VERIFIER,
        "all others are equal": not right["different"],
        "every first draft is ours": right["same_drafts"] == right["drafts"],
        "layer ids off by one are seen": wrong["same_drafts"] < wrong["drafts"],
    }
    return found, [name for name, holds in checks.items() if not holds]


def in_vllm(python: str, case: Path, heads: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what vLLM found for each head and export, and what does not hold."""
    told = json.loads(case.read_text("utf-8"))
    found: dict[str, Any] = {}
    failed = []
    for head in heads:
        ours = told["heads"][head]
        for name in ours["exports"]:
            if not name.startswith(("vllm", "speculators")) or name == "speculators-wrong":
                continue
            out = case.with_name(f"vllm-{head}-{name}.json")
            call(python, "in_vllm.py", str(case), str(out), head, name)
            theirs = json.loads(out.read_text("utf-8"))
            same = sum(a == b for a, b in zip(theirs.pop("texts"), told["texts"], strict=True))
            row = {**theirs, "ours": {"rounds": ours["rounds"], "accepted": ours["accepted"]}}
            found[f"{head}: {name}"] = {"texts_equal": same, "of": len(told["texts"]), **row}
            equal = theirs["rounds"] == ours["rounds"]
            if same != len(told["texts"]):
                failed.append(f"{head}: {name}: a text differs")
            if equal == name.endswith("-wrong"):
                failed.append(f"{head}: {name}: {theirs['rounds']} rounds, ours {ours['rounds']}")
            print(
                f"{head}: {name}: texts {same}/{len(told['texts'])}, rounds {theirs['rounds']}, "
                f"ours {ours['rounds']}",
                flush=True,
            )
    return found, failed


def main(arguments: list[str]) -> int:
    """Prepare, ask every engine, and write results; return the exit code."""
    work = Path(arguments[0]).resolve()
    given = dict(word.split("=", 1) for word in arguments[1:])
    heads = given.get("heads", "eagle3").split(",")
    prepare = [sys.executable, str(HERE / "prepare.py"), str(work), *heads]
    subprocess.run(prepare, check=True)
    case, day = work / "case.json", datetime.now(UTC).date().isoformat()
    failures: list[str] = []
    for engine in ("speculators", "vllm"):
        if engine not in given:
            continue
        if engine == "speculators":
            found, failed = in_speculators(given[engine], case)
        else:
            found, failed = in_vllm(given[engine], case, heads)
        failures += failed
        text = json.dumps({"date": day, "engine": engine, "failed": failed, **found}, indent=2)
        (RESULTS / f"{day}-interop-{engine}.json").write_text(text + "\n", "utf-8")
    for failure in failures:
        print(f"does not hold: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
