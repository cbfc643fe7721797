"""Prompts cut from documents that nothing was trained on.

A text gives its first tokens, a chat its user's turns, and a file of the standard library its
documented functions, each from ``def`` to the end of the docstring.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from falcon_lab.config.schema import PromptsConfig
from falcon_lab.data.corpora import corpus, digest
from falcon_lab.data.documents import Document

TOKENS = PromptsConfig.prompt_tokens
PER_FILE = 4
"""Functions that one file gives at the most."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one turn or several.

    Attributes:
        id: unique in its set; the ``question_id`` of the answers.
        category: what results are grouped by.
        turns: the user's texts, one a turn.
    """

    id: str
    category: str
    turns: list[str]


def heldout_prompts(
    source: str, tokenizer: Any, *, split: str = "heldout", tokens: int = TOKENS, seed: int
) -> Iterator[Prompt]:
    """Yield the prompts of a corpus, in an order that depends on ``seed`` alone.

    Args:
        source: name of the corpus, as ``corpus`` takes it.
        tokenizer: the target's; a prompt ends at one of its tokens.
        split: ``heldout`` or ``validation``.
        tokens: tokens of a prompt at the most.
        seed: the data's.
    """
    if (source, split) == ("stdlib", "heldout"):
        for name, text in heldout_functions(seed):
            yield Prompt(name, "stdlib", [_beginning(text, tokens, tokenizer, whole=True)])
        return
    for document in corpus(source, split=split, seed=seed):
        turns = _turns(document, tokens, tokenizer)
        if turns:
            yield Prompt(document.id, split, turns)


def _turns(document: Document, tokens: int, tokenizer: Any) -> list[str]:
    """Return the beginning of a text, or the user's turns of a chat."""
    if document.messages is None:
        text = _beginning(document.text or "", tokens, tokenizer)
        return [text] if text.strip() else []
    turns = [m["content"] for m in document.messages if m["role"] == "user" and m["content"]]
    system = [m["content"] for m in document.messages if m["role"] == "system"]
    # A prompt has turns of a user only, so a system message goes before the first.
    return ["\n\n".join([*system, turns[0]]), *turns[1:]] if turns else []


def _beginning(text: str, tokens: int, tokenizer: Any, *, whole: bool = False) -> str:
    """Return the first tokens of a text as text that encodes to just these tokens.

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


# --- functions of the standard library ------------------------------------------------------------


def heldout_functions(seed: int) -> Iterator[tuple[str, str]]:
    """Yield ``(name, beginning)`` of documented held-out functions, files alternating."""
    files = [
        prompts
        for document in corpus("stdlib", split="heldout", seed=seed)
        if (prompts := beginnings(document.id, document.text or "", seed))
    ]
    for turn in range(PER_FILE):
        yield from (prompts[turn] for prompts in files if turn < len(prompts))


def beginnings(name: str, source: str, seed: int) -> list[tuple[str, str]]:
    """Return ``(name:qualified name, text)`` of some functions of a file, chosen by ``seed``."""
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
    """Return whether a function has a docstring and a body left to write."""
    return ast.get_docstring(function) is not None and len(function.body) > 1


def beginning(function: Function, lines: list[str]) -> str:
    """Return the text from ``def`` to the end of the docstring, dedented."""
    end = function.body[0].end_lineno or function.lineno
    return textwrap.dedent("\n".join(lines[function.lineno - 1 : end])) + "\n"
