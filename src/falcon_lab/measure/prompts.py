"""Prompts of an evaluation: held-out data, prompts of one's own, and the field's prompt sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import PromptsConfig
from falcon_lab.data.documents import MEND, kind, read_jsonl
from falcon_lab.data.heldout import Prompt, heldout_prompts
from falcon_lab.data.hub import hub_rows
from falcon_lab.errors import FalconLabError

HELDOUT = 32
"""Held-out prompts when no limit is given."""
OF_CORPUS = ("heldout", "validation", "stdlib")
"""Sets that are cut from a corpus."""


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


def check_prompts(config: PromptsConfig) -> None:
    """See that there are prompts, as far as no target is needed for it; nothing is cut or encoded.

    Raises:
        FalconLabError: as ``load_prompts``.
    """
    if config.texts or config.name not in OF_CORPUS:
        for _ in _prompts(config, "", None, 0):
            pass


def _prompts(config: PromptsConfig, name: str, tokenizer: Any, seed: int) -> Iterator[Prompt]:
    if config.texts:
        return _own(config.texts)
    if config.name in OF_CORPUS:
        if config.prompt_tokens < 1:
            raise FalconLabError("evaluation.prompts.prompt_tokens must be at least 1")
        stdlib = config.name == "stdlib"
        source, split = ("stdlib", "heldout") if stdlib else (name, config.name)
        return islice(
            heldout_prompts(source, tokenizer, split=split, tokens=config.prompt_tokens, seed=seed),
            config.limit or HELDOUT,
        )
    if config.name in HUB:
        return _from_hub(config.name)
    return read_prompts(Path(config.name))


def _own(texts: Sequence[str]) -> Iterator[Prompt]:
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise FalconLabError(f"evaluation.prompts.texts: text {number} is empty")
        yield Prompt(f"text/{number}", "own", [text])


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
            raise FalconLabError(f"{path}:{number}: {error}; {MEND}") from None
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
    """Parse one line of the MT-bench format.

    Raises:
        ValueError: what is wrong with it.
    """
    for key in ("question_id", "turns"):
        if key not in value:
            raise ValueError(f"no {key!r} among its keys ({', '.join(value) or 'none':.80})")
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
    rows = hub_rows(where, split, f"evaluation.prompts.name={name}", instead)
    for number, row in enumerate(rows):
        yield parse_prompt({"category": name, **convert(row, number)})
