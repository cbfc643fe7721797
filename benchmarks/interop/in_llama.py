"""Decode with exported drafters in llama.cpp, greedily in float32; runs where falcon-lab is.

    PYTHON in_llama.py CASE.json OUT.json FOLDER HEAD:EXPORT…

FOLDER is llama.cpp's source, with ``build/bin/llama-speculative-simple``. Its own converter, which
imports ``sentencepiece``, writes the target and every export as GGUF files.

That program drafts before it has a first token of its own, which no other engine here does: the
first token of every text is given to it behind the prompt, so that its rounds begin where ours do.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from exports import ask_each
from tokenizers import Tokenizer

KINDS = {"draft_model": "draft-simple", "eagle3": "draft-eagle3", "dflash": "draft-dflash"}
"""What llama.cpp calls the methods of vLLM that it has too."""
DRAFTED = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")
VERIFIED = re.compile(r"accepted (\d+)/(\d+) draft tokens")
COUNTED = re.compile(r"n_(drafted|accept) += (\d+)")
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
"""How the tokenizer of ``tiny-code`` splits words, of which the converter knows no hash."""


class Program(NamedTuple):
    """llama.cpp's, the target as it reads it, and the target's tokenizer."""

    path: Path
    target: Path
    tokenizer: Tokenizer


def converter(folder: Path, tokenizer: Path) -> Any:
    """Return llama.cpp's converter, told the split of words where it is GPT-2's."""
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    split = json.loads(tokenizer.read_text("utf-8"))["pre_tokenizer"]
    if split.items() >= GPT2.items():
        words = importlib.import_module("conversion.base").TextModel
        words.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    return importlib.import_module("convert_hf_to_gguf")


def converted(converter: Any, folder: Path, out: Path, target: str | None = None) -> Path:
    """Return the GGUF file of a folder, after it was written."""
    words = [str(folder), "--outfile", str(out), "--outtype", "f32"]
    sys.argv = ["convert", *words, *(["--target-model-dir", target] if target else [])]
    converter.main()
    return out


def answered(program: Program, draft: Path, told: dict[str, Any], prompt: str, new: int) -> Any:
    """Return what the program printed behind a prompt, and its log."""
    words: dict[str, Any] = {
        "--model": program.target,
        "--model-draft": draft,
        "--spec-type": KINDS[told["method"]],
        "--spec-draft-n-max": told["draft_tokens"],
        "--spec-draft-p-min": 0,
        "--prompt": prompt,
        "--predict": new,
        "--temp": 0,
        "--ctx-size": 1024,
        "--fit": "off",
        "--flash-attn": "off",
        "--threads": 1,
        "--verbosity": 5,
        "--log-colors": "off",
    }
    for cache in ("--cache-type-k", "--cache-type-v"):
        words |= {cache: "f32", f"{cache}-draft": "f32"}
    call = [
        str(program.path),
        "--no-escape",
        *(str(each) for word in words.items() for each in word),
    ]
    done = subprocess.run(call, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    log = done.stderr.decode("utf-8", "replace")
    if done.returncode:
        raise RuntimeError(f"ends with {done.returncode}: {log[-300:]}")
    printed = done.stdout.decode("utf-8", "replace").removeprefix("\n\n")
    if not printed.startswith(prompt):
        raise RuntimeError(f"reads another prompt: {printed[: len(prompt)]!r}")
    return printed.removeprefix(prompt).removesuffix("\n\n\n\n"), log


def version_of(program: Program) -> dict[str, str]:
    """Return llama.cpp's version, as the program says it."""
    call = [str(program.path), "--version"]
    done = subprocess.run(call, capture_output=True, check=True, text=True)
    said = re.search(r"version: (\S+)", done.stdout + done.stderr)
    return {"llama.cpp": said[1]} if said else {}


def drafts_of(log: str) -> list[tuple[int, list[int]]]:
    """Return how many tokens were accepted in each round, and what was drafted."""
    rounds, begin = [], 0
    for verified in VERIFIED.finditer(log):
        accepted, drafted = map(int, verified.groups())
        listed = DRAFTED.findall(log, begin, verified.start())
        rounds.append((accepted, [int(token) for _, token in listed][:drafted]))
        begin = verified.end()
    return rounds


def verified_with(
    program: Program, draft: Path, told: dict[str, Any], prompt: str, new: int
) -> tuple[str, list[tuple[int, list[int]]]]:
    """Return what was printed, and the rounds; asks again where the log lost lines, as it may."""
    for _ in range(5):
        printed, log = answered(program, draft, told, prompt, new)
        rounds = drafts_of(log)
        counted = {name: int(count) for name, count in COUNTED.findall(log)}
        drafted = sum(len(tokens) for _, tokens in rounds)
        if counted == {"drafted": drafted, "accept": sum(each for each, _ in rounds)}:
            return printed, rounds
    raise RuntimeError("its log and its counters never agree")


def decoded(case: dict[str, Any], program: Program, draft: Path, head: str) -> dict[str, Any]:
    """Return the texts with one draft, what was drafted, and what was counted.

    Rounds are those that begin inside a text; llama.cpp's own counters, ``drafted`` and
    ``accepted``, are of what it decoded behind the end too.
    """
    told, new = case["heads"][head], case["new"]
    found: dict[str, Any] = {"texts": [], "drafts": [], "rounds": 0, "drafted": 0, "accepted": 0}
    for prompt, ours in zip(case["prompts"], case["texts"], strict=True):
        given, rest = [*prompt, ours[0]], ours[1:]
        text = program.tokenizer.decode(given, skip_special_tokens=False)
        if program.tokenizer.encode(text, add_special_tokens=False).ids != given:
            raise RuntimeError("a prompt's text is that of other tokens")
        printed, verified = verified_with(program, draft, told, text, len(rest))
        expected = program.tokenizer.decode(rest, skip_special_tokens=False)
        tokens = program.tokenizer.encode(printed, add_special_tokens=False).ids
        found["texts"].append(ours if printed.startswith(expected) else [ours[0], *tokens])
        rounds, place = [], 1
        for accepted, drafted in verified:
            if place < new:
                rounds.append(drafted)
            place += accepted + 1
        found["drafts"].append(rounds)
        found["rounds"] += len(rounds)
        found["drafted"] += sum(len(drafted) for _, drafted in verified)
        found["accepted"] += sum(accepted for accepted, _ in verified)
    return found


def main(arguments: list[str]) -> None:
    """Write texts and counters after every export."""
    case, out = json.loads(Path(arguments[0]).read_text("utf-8")), Path(arguments[1])
    folder, target = Path(arguments[2]), Path(case["target"])
    files = out.with_name("gguf")
    files.mkdir(exist_ok=True)
    write = converter(folder, target / "tokenizer.json")
    program = Program(
        folder / "build/bin/llama-speculative-simple",
        converted(write, target, files / "target.gguf"),
        Tokenizer.from_file(str(target / "tokenizer.json")),
    )
    known = {name: version(name) for name in ("torch", "transformers")}

    def ask(head: str, name: str) -> dict[str, Any]:
        export = Path(case["heads"][head]["exports"][name])
        draft = converted(write, export, files / f"{export.name}.gguf", str(target))
        return decoded(case, program, draft, head)

    ask_each(arguments[3:], {"versions": {**version_of(program), **known}}, out, ask)


if __name__ == "__main__":
    main(sys.argv[1:])
