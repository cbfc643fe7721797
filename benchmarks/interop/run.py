"""Prove that exported drafters do in other engines what they do here; see README.md.

python benchmarks/interop/run.py WORK [ENGINE=PYTHON | llama=FOLDER]… [HEAD | HEAD=DRAFTER]…

Options are those of ``prepare.py``, with an equals sign: ``--prompts=4 --new=48``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
VERIFIER = ["verifier_lm_head.weight", "verifier_norm.weight"]
WRONG = "-wrong"
LLAMA_METHODS = ("draft_model", "eagle3", "dflash")
ELSEWHERE = (
    "transformers",
    f"speculators{WRONG}",
    *(f"{name}{each}" for name in ("openvino", "sglang") for each in ("", WRONG)),
)
"""Exports that neither vLLM nor llama.cpp is asked for."""
OPENVINO = {"draft_model": "vllm", "eagle3": "openvino"}
"""The formats that OpenVINO reads, of vLLM's methods that it has too."""


def call(python: str, script: str, *arguments: str) -> None:
    """Run a script in an environment of its own; ours has our modules."""
    environment = dict(os.environ)
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
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


def in_transformers(python: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what ``model.generate`` does with each drafter, and what does not hold."""
    told, out = json.loads(case.read_text("utf-8")), case.with_name("transformers.json")
    call(python, "in_transformers.py", str(case), str(out))
    found = json.loads(out.read_text("utf-8"))
    failed = []
    for head, ways in found["heads"].items():
        for way, row in ways.items():
            texts = row.pop("texts")
            same = sum(a == b for a, b in zip(texts, told["texts"], strict=True))
            row |= {"texts_equal": same, "texts": len(texts)}
            if same != len(texts):
                failed.append(f"{head}: {way}: a text differs")
            if "rounds" in row:
                row["ours"] = {"rounds": told["heads"][head]["rounds"]}
                if row["rounds"] != row["ours"]["rounds"]:
                    failed.append(f"{head}: {way}: {row['rounds']} rounds, ours {row['ours']}")
    return found, failed


def in_states(python: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what vLLM's hidden states are of the case's target, and what does not hold."""
    told, out = json.loads(case.read_text("utf-8")), case.with_name("states.json")
    work = str(case.with_name("states"))
    call(sys.executable, "states.py", told["name"], work, str(out), python)
    found = json.loads(out.read_text("utf-8"))
    return found, found.pop("failed")


def words_of(told: dict[str, Any], wanted: Callable[[str, str], bool]) -> list[str]:
    """Return ``HEAD:EXPORT`` of each export that an engine is asked about."""
    pairs = ((head, name) for head, ours in told["heads"].items() for name in ours["exports"])
    return [f"{head}:{name}" for head, name in pairs if wanted(head, name)]


def in_vllm(python: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what vLLM found for each head and export, and what does not hold."""
    told = json.loads(case.read_text("utf-8"))
    out = case.with_name("vllm.json")
    words = words_of(told, lambda head, name: name not in ELSEWHERE)
    call(python, "in_vllm.py", str(case), str(out), *words)
    return asked(told, json.loads(out.read_text("utf-8")), "vLLM")


def in_sglang(python: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what SGLang found for each head that it has, and what does not hold."""
    told = json.loads(case.read_text("utf-8"))
    out = case.with_name("sglang.json")
    words = words_of(told, lambda head, name: name.removesuffix(WRONG) in ("sglang", "served"))
    call(python, "in_sglang.py", str(case), str(out), *words)
    return asked(told, json.loads(out.read_text("utf-8")), "SGLang")


def in_llama(folder: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what llama.cpp found for each head that it has, and what does not hold.

    It decodes up to two rounds behind a text, and drafts where a text has no room for it.
    """
    told = json.loads(case.read_text("utf-8"))
    out = case.with_name("llama.json")

    def reads(head: str, name: str) -> bool:
        known = told["heads"][head]["method"] in LLAMA_METHODS and head != "dflash-vocabulary"
        return known and name not in ELSEWHERE

    words = words_of(told, reads)
    call(sys.executable, "in_llama.py", str(case), str(out), folder, *words)
    found, failed = asked(told, json.loads(out.read_text("utf-8")), "llama.cpp")
    for head, rows in found["heads"].items():
        depth = told["heads"][head]["draft_tokens"] * len(told["texts"])
        drafted = sum(len(each) for text in told["heads"][head]["drafts"] for each in text)
        for name, row in rows.items():
            if "ended" in row:
                continue
            row["ours"]["drafted"] = drafted
            for key, behind in (("accepted", depth), ("drafted", 2 * depth)):
                more = row[key] - row["ours"][key]
                if not name.endswith(WRONG) and not 0 <= more <= behind:
                    failed.append(f"{head}:{name}: {more} more {key} than ours")
    return found, failed


def in_openvino(python: str, case: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what OpenVINO GenAI found for draft models and EAGLE-3, and what does not hold.

    It tells how many tokens every pass added, of which the first is that over the prompt; they
    stand for the drafts, which it does not tell.
    """
    told, out = json.loads(case.read_text("utf-8")), case.with_name("openvino.json")

    def reads(head: str, name: str) -> bool:
        return name.removesuffix(WRONG) == OPENVINO.get(told["heads"][head]["method"])

    words = words_of(told, reads)
    call(python, "in_openvino.py", str(case), str(out), *words)
    theirs = json.loads(out.read_text("utf-8"))
    for ours in told["heads"].values():
        pairs = zip(ours["drafts"], told["texts"], strict=True)
        ours["drafts"] = [[[each] for each in added(*pair)] for pair in pairs]
    for found in theirs["exports"].values():
        if "added" in found:
            rounds = [each[1:] for each in found.pop("added")]
            found["rounds"] = sum(map(len, rounds))
            found["accepted"] = sum(map(sum, rounds)) - found["rounds"]
            found["drafts"] = [[[each] for each in text] for text in rounds]
    found, failed = asked(told, theirs, "OpenVINO")
    for rows in found["heads"].values():
        for row in rows.values():
            for key in ("equal", "compared"):
                if f"drafts_{key}" in row:
                    row[f"rounds_{key}"] = row.pop(f"drafts_{key}")
    if theirs["plain"] != told["texts"]:
        failed.append("without a drafter a text differs")
    return found, failed


def added(drafts: list[list[int]], text: list[int]) -> list[int]:
    """Return how many tokens every round of ours added to a text behind its first token."""
    found, place = [], 1
    for draft in drafts:
        pairs = zip(draft, text[place:], strict=False)
        wrong = [k for k, (token, own) in enumerate(pairs) if token != own]
        accepted = wrong[0] if wrong else min(len(draft), len(text) - place)
        found.append(min(accepted + 1, len(text) - place))
        place += found[-1]
    return found


def asked(
    told: dict[str, Any], theirs: dict[str, Any], engine: str
) -> tuple[dict[str, Any], list[str]]:
    """Return what an engine found for each export beside ours, and what of it does not hold."""
    rows: dict[str, Any] = {}
    failed = []
    for word, found in theirs["exports"].items():
        head, name = word.split(":")
        if problem := found.get("error"):
            if name.endswith(WRONG) and problem.startswith("ends with"):  # by the engine itself
                rows.setdefault(head, {})[name] = {"mistake": told["heads"][head]["mistake"]}
                rows[head][name]["ended"] = problem.rpartition("/")[2]
            else:
                failed.append(f"{word}: {engine} ended with: {problem}")
            continue
        row, problems = compared(told, head, found, wrong=name.endswith(WRONG))
        rows.setdefault(head, {})[name] = row
        failed += [f"{word}: {problem}" for problem in problems]
        print(
            f"{word}: texts {row['texts_equal']}/{row['texts']}, rounds {row['rounds']}, "
            f"ours {row['ours']['rounds']}",
            flush=True,
        )
    return {"versions": theirs["versions"], "heads": rows}, failed


def compared(
    told: dict[str, Any], head: str, theirs: dict[str, Any], *, wrong: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return what an engine found beside ours, and what of it does not hold.

    Args:
        told: the case.
        head: of the case.
        theirs: texts and counters.
        wrong: whether a mistake was planted, which must be seen.
    """
    ours = told["heads"][head]
    texts, drafts = theirs.pop("texts"), theirs.pop("drafts")
    same = sum(a == b for a, b in zip(texts, told["texts"], strict=True))
    row: dict[str, Any] = {"texts_equal": same, "texts": len(texts), **theirs}
    row["ours"] = {key: ours[key] for key in ("rounds", "accepted", "draft_tokens")}
    row |= drafts_compared(drafts, ours["drafts"])
    if wrong:
        row["mistake"] = ours["mistake"]
    problems = [] if same == len(texts) else ["a text differs"]
    if wrong and row["drafts_equal"] == row["drafts_compared"]:
        problems.append("nobody sees the mistake")
    if not wrong and theirs["rounds"] != ours["rounds"]:
        problems.append(f"{theirs['rounds']} rounds, ours {ours['rounds']}")
    return row, problems


def drafts_compared(theirs: list[Any], ours: list[Any]) -> dict[str, int]:
    """Return how many rounds drafted what ours did, as long as both stand at the same place.

    They do until a draft that is accepted on one side alone; ours is shorter where a text ends.
    """
    equal = compared = 0
    for their_rounds, our_rounds in zip(theirs, ours, strict=True):
        for their, our in zip(their_rounds, our_rounds, strict=False):
            compared += 1
            equal += their[: len(our)] == our
    return {"drafts_equal": equal, "drafts_compared": compared}


def record(name: str, about: dict[str, Any], found: dict[str, Any], failed: list[str]) -> None:
    """Write what was found of a target beside what was found of others on that day."""
    day = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"{day}-interop-{name}.json"
    runs = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []
    runs = [each for each in runs if each["target"] != about["target"]]
    runs.append({**about, "failed": failed, **found})
    path.write_text(json.dumps({"date": day, "runs": runs}, indent=2) + "\n", "utf-8")


ENGINES = {
    "llama": in_llama,
    "openvino": in_openvino,
    "sglang": in_sglang,
    "speculators": in_speculators,
    "states": in_states,
    "transformers": in_transformers,
    "vllm": in_vllm,
}


def main() -> int:
    """Prepare, ask every engine, and write results; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--name", default="", help="ends the name of the results")
    given, options = parser.parse_known_args()
    work = given.work.resolve()
    split = [word.partition("=") for word in given.words]
    engines = {name: python for name, _, python in split if name in ENGINES}
    heads = [word for word in given.words if word.partition("=")[0] not in ENGINES]
    prepare = [sys.executable, str(HERE / "prepare.py"), str(work), *heads, *options]
    subprocess.run(prepare, check=True)
    case = work / "case.json"
    told = json.loads(case.read_text("utf-8"))
    failures: list[str] = []
    for engine, python in engines.items():
        found, failed = ENGINES[engine](python, case)
        failures += failed
        about = {"target": told["name"]}
        if engine != "states":  # which reads the texts of a training
            about |= {"prompts": len(told["prompts"]), "new_tokens": told["new"]}
        record(f"{engine}{given.name}", about, found, failed)
    for failure in failures:
        print(f"does not hold: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
