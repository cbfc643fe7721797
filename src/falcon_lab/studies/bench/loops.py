"""Assemble what a benchmark compares: others' ways to decode, and our own loops."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.schema import PLAIN, DecodingConfig
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.measure.engines import Methods, Setup
from falcon_lab.measure.hf_generate import HfGenerate
from falcon_lab.measure.llama_generate import LlamaGenerate
from falcon_lab.measure.measurement import Engine
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.gguf_header import is_gguf
from falcon_lab.model.self_check import check_target
from falcon_lab.pretraining.target import source_of
from falcon_lab.studies.bench import (
    DRAFTER,
    HF,
    HF_ASSISTED,
    HF_LOOKUP,
    HF_STATIC,
    LLAMA_CPP,
    METHODS,
)

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

LOOKUP_TOKENS = 10
"""Tokens that a lookup proposes: the default of Hugging Face's candidate generator."""


Attempt = Callable[[HfGenerate | LlamaGenerate], object]


def hf_modes(
    target: Target,
    methods: Collection[str],
    assistant: Target | None = None,
    *,
    attempt: Attempt,
) -> tuple[dict[str, HfGenerate], dict[str, str]]:
    """Return the engines of ``methods``, and why this model cannot do the others.

    ``generate`` compiles the pass over a static cache on a GPU, and not on a CPU.

    Args:
        target: whose model generates.
        methods: keys of ``METHODS``; ours are passed over.
        assistant: a smaller model with the same vocabulary, for assisted generation.
        attempt: lets an engine generate once, to see whether it can. It should be the longest
            text of all: a compiled static cache of one length is then enough for every other.

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
    """See that two models have one vocabulary: assisted generation passes token ids on.

    Raises:
        FalconLabError: they mean different things to the two.
    """
    same = target.tokenizer.get_vocab() == assistant.tokenizer.get_vocab()
    if not same or target.config.vocab_size != assistant.config.vocab_size:
        raise FalconLabError(
            f"assistant {assistant.name} has another vocabulary than target {target.name}; name a "
            "smaller model of the same family"
        )


def llama_cpp(setup: Setup, *, attempt: Attempt) -> LlamaGenerate | str:
    """Return llama.cpp on the target's own file, or why it cannot be compared.

    Args:
        setup: knows the target.
        attempt: lets an engine generate once, to see whether it can.
    """
    path = source_of(setup.experiment.target, setup.announce, setup.components)
    if setup.target.tuning is not None:
        return "the target is tuned, and no GGUF file has its weights"
    if not isinstance(path, str) or not is_gguf(path):
        return "the target is no GGUF file"
    threads = setup.experiment.evaluation.threads or torch.get_num_threads()
    engine = LlamaGenerate(setup.target, path, threads)
    return fault(engine, attempt) or engine


def fault(engine: HfGenerate | LlamaGenerate, attempt: Attempt) -> str | None:
    """Return why a model cannot decode this way; None when it can."""
    try:
        attempt(engine)
    except FalconLabError as error:
        return str(error)
    except Exception as error:  # whatever a model raises that was not made for it
        return f"{type(error).__name__}: {one_line(error)[:200]}"
    return None


LEAN, MODULES = "plain, lean forward", "plain, HF modules"
EAGER = "plain, not compiled"


@dataclass
class Benchmark:
    """Holds what is compared.

    Attributes:
        others: method -> what decodes without a drafter of ours, ``plain`` first.
        loops: those of them that are our own.
        methods: what drafts, and what is reported about it and about what is left out.
    """

    others: dict[str, Engine]
    loops: list[str]
    methods: Methods = field(default_factory=Methods)

    @property
    def engines(self) -> dict[str, Engine]:
        """Return everything that is measured."""
        return {**self.others, **self.methods.engines}

    @property
    def ours(self) -> dict[str, Engine]:
        """Return our own loops."""
        return {name: self.others[name] for name in self.loops} | self.methods.engines


def benchmark(
    setup: Setup,
    methods: Collection[str],
    assistant: Target | None = None,
    *,
    attempt: Callable[[Any], object],
) -> Benchmark:
    """Assemble everything that ``methods`` asks for.

    ``plain`` and the drafter's trees go through the forward pass that ``target.lean`` asks for; the
    same loop through the other one stands beside them.

    Args:
        setup: builds the engines.
        methods: keys of ``METHODS``.
        assistant: a model for assisted generation.
        attempt: lets an engine generate once, to see whether it can.

    Raises:
        FalconLabError: a part of a method is not there.
    """
    found = Benchmark({PLAIN: setup.plain()}, [PLAIN])
    theirs, left_out = hf_modes(setup.target, methods, assistant, attempt=attempt)
    found.others |= theirs
    if LLAMA_CPP in methods:
        theirs_too = llama_cpp(setup, attempt=attempt)
        if isinstance(theirs_too, str):
            left_out[METHODS[LLAMA_CPP]] = theirs_too
        else:
            found.others[METHODS[LLAMA_CPP]] = theirs_too
    if DRAFTER in methods:
        found.methods = setup.methods()
        found.methods.leave_out_others()
    found.methods.left_out = left_out | found.methods.left_out
    if PLAIN in methods:
        add_other_forward(found, setup.target, setup.experiment.decoding)
    return found


def add_other_forward(found: Benchmark, target: Target, decoding: DecodingConfig) -> None:
    """Add the plain loop through the forward passes that the target does not take."""
    if target.is_compiled:
        found.others[EAGER] = PlainEngine(target.plain(), decoding=decoding)
        found.loops.append(EAGER)
    lean = target.backbone.lean is None
    name = LEAN if lean else MODULES
    twin = target.plain()
    twin.backbone = Backbone(target.model.get_decoder(), lean=lean)
    if lean and twin.backbone.lean is None:
        found.methods.left_out[name] = f"there is none for {target.config.model_type}"
        return
    check_target(twin)
    found.others[name] = PlainEngine(twin, decoding=decoding)
    found.loops.append(name)
