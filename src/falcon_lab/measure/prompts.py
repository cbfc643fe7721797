"""Functions of the standard library's held-out files, as prompts: ``def`` line and docstring.

What is asked at evaluation: held-out data, prompts of one's own, and the field's prompt sets.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import PromptsConfig
from falcon_lab.data.chats import kind, read_jsonl
from falcon_lab.data.corpora import Document, corpus, digest
from falcon_lab.errors import FalconLabError

PER_FILE = 4
"""Functions that one file gives at the most."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def heldout_functions(seed: int) -> Iterator[tuple[str, str]]:
    """``(name, beginning)`` of documented functions of the held-out files, files alternating."""
    files = [
        prompts
        for document in corpus("stdlib", split="heldout", seed=seed)
        if (prompts := beginnings(document.id, document.text or "", seed))
    ]
    for turn in range(PER_FILE):
        yield from (prompts[turn] for prompts in files if turn < len(prompts))


def beginnings(name: str, source: str, seed: int) -> list[tuple[str, str]]:
    """``(name:qualified name, text)`` of some functions of a file, chosen by ``seed``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a few library files show what must not parse
        return []
    lines = source.splitlines()
    found = {
        f"{name}:{qualified}": beginning(function, lines)
        for qualified, function in _functions(tree, "")
        if has_docstring_and_body(function)
    }
    chosen = sorted(found, key=lambda key: digest(f"{seed}:{key}"))[:PER_FILE]
    return [(key, found[key]) for key in chosen]


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def has_docstring_and_body(function: Function) -> bool:
    """Whether there is something to say and something left to write."""
    return ast.get_docstring(function) is not None and len(function.body) > 1


def beginning(function: Function, lines: list[str]) -> str:
    """From ``def`` to the end of the docstring, as if at the left margin."""
    end = function.body[0].end_lineno or function.lineno
    return textwrap.dedent("\n".join(lines[function.lineno - 1 : end])) + "\n"


HELDOUT = 32
"""Held-out prompts when no limit is given."""
OF_CORPUS = ("heldout", "validation", "stdlib")
"""Sets that are cut from a corpus."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one turn or several.

    Attributes:
        id: unique in its set; the ``question_id`` of the answers.
        category: what results are grouped by.
        turns: what is said, one text a turn.
    """

    id: str
    category: str
    turns: list[str]


def load_prompts(config: PromptsConfig, *, corpus: str, tokenizer: Any, seed: int) -> list[Prompt]:
    """The prompts that a configuration asks for.

    ``texts`` come first; else ``heldout`` (documents of ``corpus`` that nothing was trained on),
    ``validation`` (those that training looked at without learning them), ``stdlib`` (its held-out
    functions, from ``def`` to the docstring), ``humaneval``, ``gsm8k`` or ``mt_bench`` from the
    hub, or a JSONL file in the MT-bench format.

    Args:
        config: the ``evaluation.prompts`` section.
        corpus: the data's corpus.
        tokenizer: the target's; held-out prompts are cut at its tokens.
        seed: the data's.

    Raises:
        FalconLabError: no such set, nothing in it, or a line that is no prompt.
    """
    if config.limit is not None and config.limit < 1:
        raise FalconLabError(f"evaluation.prompts.limit is {config.limit}; it must be at least 1")
    found = list(islice(_prompts(config, corpus, tokenizer, seed), config.limit))
    if not found:
        raise FalconLabError(f"evaluation.prompts {config.name}: there is no prompt in it")
    return found


def _prompts(config: PromptsConfig, name: str, tokenizer: Any, seed: int) -> Iterator[Prompt]:
    if config.texts:
        return _own(config.texts)
    if config.name in OF_CORPUS:
        if config.prompt_tokens < 1:
            raise FalconLabError("evaluation.prompts.prompt_tokens must be at least 1")
        return islice(_of_corpus(config, name, tokenizer, seed), config.limit or HELDOUT)
    if config.name in HUB:
        return _from_hub(config.name)
    return read_prompts(Path(config.name))


def _own(texts: Sequence[str]) -> Iterator[Prompt]:
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise FalconLabError(f"evaluation.prompts.texts: text {number} is empty")
        yield Prompt(f"text/{number}", "own", [text])


# --- held-out data ------------------------------------------------------------------------------


def _of_corpus(config: PromptsConfig, source: str, tokenizer: Any, seed: int) -> Iterator[Prompt]:
    tokens = config.prompt_tokens
    if config.name == "stdlib" or (config.name, source) == ("heldout", "stdlib"):
        for name, text in heldout_functions(seed):
            yield Prompt(name, "stdlib", [_beginning(text, tokens, tokenizer, whole=True)])
        return
    for document in corpus(source, split=config.name, seed=seed):
        turns = _turns(document, tokens, tokenizer)
        if turns:
            yield Prompt(document.id, config.name, turns)


def _turns(document: Document, tokens: int, tokenizer: Any) -> list[str]:
    """The beginning of a text, or what the user of a chat says."""
    if document.messages is None:
        text = _beginning(document.text or "", tokens, tokenizer)
        return [text] if text.strip() else []
    turns = [m["content"] for m in document.messages if m["role"] == "user" and m["content"]]
    system = [m["content"] for m in document.messages if m["role"] == "system"]
    # A prompt has turns of a user only, so a system message goes before the first.
    return ["\n\n".join([*system, turns[0]]), *turns[1:]] if turns else []


def _beginning(text: str, tokens: int, tokenizer: Any, *, whole: bool = False) -> str:
    """The first tokens of a text as text that encodes to just these tokens.

    Unless ``whole`` is allowed, half of the text at least is left for the model to write.
    """

    def encoded(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    ids = encoded(text)
    most = min(tokens, len(ids) if whole else len(ids) // 2)
    # A few cuts fall inside a character, or where the tokenizer would now join two tokens.
    for count in range(most, max(most - 8, 0), -1):
        part = str(tokenizer.decode(ids[:count]))
        if encoded(part) == ids[:count]:
            return part
    return str(tokenizer.decode(ids[:most])).rstrip("\ufffd")


# --- files in the MT-bench format ---------------------------------------------------------------


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Prompts of a JSONL file with ``question_id``, ``category`` and ``turns`` a line.

    Raises:
        FalconLabError: no such file, no prompt in it, or a line that is none, with its number.
    """
    if not path.is_file():
        known = ", ".join((*OF_CORPUS, *HUB))
        raise FalconLabError(
            f"evaluation.prompts.name is {str(path)!r}: no such file, and none of {known}"
        )
    lines: dict[str, int] = {}
    for number, value in read_jsonl(path):
        try:
            prompt = parse_prompt(value)
        except ValueError as error:
            raise FalconLabError(f"{path}:{number}: {error}") from None
        if prompt.id in lines:
            raise FalconLabError(
                f"{path}:{number}: question_id {prompt.id!r} stands in line {lines[prompt.id]} "
                "already"
            )
        lines[prompt.id] = number
        yield prompt
    if not lines:
        raise FalconLabError(f"{path}: the file has no prompt in it")


def parse_prompt(value: Mapping[str, Any]) -> Prompt:
    """One line of the MT-bench format.

    Raises:
        ValueError: what is wrong with it.
    """
    for key in ("question_id", "turns"):
        if key not in value:
            raise ValueError(f"no {key!r} among its keys ({', '.join(value) or 'none'})")
    if isinstance(value["question_id"], bool) or not isinstance(value["question_id"], int | str):
        raise ValueError(f"question_id is {kind(value['question_id'])}, not a number or a text")
    turns = value["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"turns is {kind(turns)}; a list of texts is needed")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            what = "empty" if isinstance(turn, str) else f"{kind(turn)}, not a text"
            raise ValueError(f"turn {number} is {what}")
    return Prompt(str(value["question_id"]), str(value.get("category", "none")), list(turns))


# --- the hub ------------------------------------------------------------------------------------

HUB: dict[str, tuple[tuple[str, ...], str, Callable[[Mapping[str, Any], int], dict[str, Any]]]] = {
    "humaneval": (
        ("openai/openai_humaneval",),
        "test",
        lambda row, _: {"question_id": row["task_id"], "turns": [row["prompt"]]},
    ),
    "gsm8k": (
        ("openai/gsm8k", "main"),
        "test",
        lambda row, number: {"question_id": f"gsm8k/{number}", "turns": [row["question"]]},
    ),
    "mt_bench": (
        ("HuggingFaceH4/mt_bench_prompts",),
        "train",
        lambda row, _: {
            "question_id": row["prompt_id"],
            "category": row["category"],
            "turns": list(row["prompt"]),
        },
    ),
}
"""Set -> (repository and configuration, split, row and number -> a line of the MT-bench format)."""


def _from_hub(name: str) -> Iterator[Prompt]:
    where, split, convert = HUB[name]
    instead = "or give a JSONL file in the MT-bench format as evaluation.prompts.name"
    try:
        from datasets import load_dataset
    except ImportError:
        raise FalconLabError(
            f"evaluation.prompts.name={name} needs the data extra: pip install "
            f"'falcon-lab[data]', {instead}"
        ) from None
    try:
        rows = load_dataset(*where, split=split)
    except Exception as error:  # the network, the hub and the cache have many ways to fail
        raise FalconLabError(
            f"evaluation.prompts.name={name}: cannot load {where[0]} from the hub "
            f"({type(error).__name__}: {first_line(error)}); go on line once, {instead}"
        ) from error
    for number, row in enumerate(rows):
        yield parse_prompt({"category": name, **convert(row, number)})


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
