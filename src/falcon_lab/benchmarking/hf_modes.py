"""Hugging Face's ways to decode, as rows of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from falcon_lab.benchmarking.methods import HF, HF_ASSISTED, HF_LOOKUP, HF_STATIC, METHODS
from falcon_lab.errors import FalconLabError
from falcon_lab.evaluation.hf_generate import HfGenerate

if TYPE_CHECKING:
    from falcon_lab.targets.target import Target

LOOKUP_TOKENS = 10
"""Tokens that a lookup proposes: what Hugging Face's candidate generator takes by itself."""


Attempt = Callable[[HfGenerate], object]


def hf_modes(
    target: Target,
    methods: Collection[str],
    assistant: Target | None = None,
    *,
    attempt: Attempt,
) -> tuple[dict[str, HfGenerate], dict[str, str]]:
    """The rows of ``methods``, and those that this model cannot do with the reason.

    ``generate`` compiles the pass over a static cache by itself on a GPU, and not on a CPU.

    Args:
        target: whose model generates.
        methods: keys of ``METHODS``; ours are passed over.
        assistant: a smaller model with the same vocabulary, for assisted generation.
        attempt: lets a row generate once, to see whether it can. It should be the longest text of
            all: a compiled static cache of one length is then enough for every other.

    Raises:
        FalconLabError: the assistant has another vocabulary.
    """
    found = {
        HF: HfGenerate(target),
        HF_STATIC: HfGenerate(target, settings={"cache_implementation": "static"}),
        HF_LOOKUP: HfGenerate(target, settings={"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    }
    left_out = {}
    if assistant is not None:
        check_assistant(target, assistant)
        found[HF_ASSISTED] = HfGenerate(target, arguments={"assistant_model": assistant.model})
    elif HF_ASSISTED in methods:
        left_out[METHODS[HF_ASSISTED]] = "no assistant was named"
    wanted = {METHODS[key]: found[key] for key in METHODS if key in methods and key in found}
    failed = {name: reason for name, engine in wanted.items() if (reason := fault(engine, attempt))}
    return {n: e for n, e in wanted.items() if n not in failed}, left_out | failed


def check_assistant(target: Target, assistant: Target) -> None:
    """Assisted generation hands token ids from one model to the other.

    Raises:
        FalconLabError: they mean different things to the two.
    """
    same = target.tokenizer.get_vocab() == assistant.tokenizer.get_vocab()
    if not same or target.config.vocab_size != assistant.config.vocab_size:
        raise FalconLabError(
            f"assistant {assistant.name} has another vocabulary than target {target.name}; name a "
            "smaller model of the same family"
        )


def fault(engine: HfGenerate, attempt: Attempt) -> str | None:
    """Why a model cannot decode this way; None when it can."""
    try:
        attempt(engine)
    except Exception as error:  # whatever a model raises that was not made for it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
