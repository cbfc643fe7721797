"""Hugging Face's ways to decode, and our own loops, as rows of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.schema import DecodingConfig, Experiment
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.engines import build_methods
from falcon_lab.measure.hf_generate import HfGenerate
from falcon_lab.measure.measurement import Engine
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.loading import check_target
from falcon_lab.studies.bench import DRAFTER, HF, HF_ASSISTED, HF_LOOKUP, HF_STATIC, METHODS, PLAIN

if TYPE_CHECKING:
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

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


LEAN, MODULES = "plain, lean forward", "plain, HF modules"
EAGER = "plain, not compiled"


@dataclass
class Contest:
    """What is compared.

    Attributes:
        engines: row -> what decodes, ``plain`` first.
        ours: rows that are our own loops.
        speculative: those of them that draft.
        labels: row -> what it is, in a few words.
        provenance: row -> kind -> name, distribution and version.
        left_out: row -> why it is not measured.
    """

    engines: dict[str, Engine] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)
    speculative: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def contest(
    experiment: Experiment,
    target: Target,
    components: Components,
    methods: Collection[str],
    assistant: Target | None = None,
    *,
    attempt: Callable[[Any], object],
) -> Contest:
    """Every row that ``methods`` asks for.

    ``plain`` and the drafter's rows go through the forward pass that ``target.lean`` asks for; the
    same loop through the other one stands beside them.

    ``attempt`` lets a row generate once, to see whether it can.

    Raises:
        FalconLabError: a part of a method is not there.
    """
    found = Contest({PLAIN: PlainEngine(target, decoding=experiment.decoding)}, ours=[PLAIN])
    theirs, found.left_out = hf_modes(target, methods, assistant, attempt=attempt)
    found.engines |= theirs
    if PLAIN in methods:
        add_other_forward(found, target, experiment.decoding)
    if DRAFTER in methods:
        built = build_methods(experiment, target, components, Path())
        found.engines |= built.engines
        found.speculative = list(built.engines)
        found.ours += found.speculative
        found.labels, found.provenance = built.labels, built.provenance
        found.left_out |= built.left_out
    return found


def add_other_forward(found: Contest, target: Target, decoding: DecodingConfig) -> None:
    """The plain loop through the forward passes that the target does not take."""
    if target.is_compiled:
        found.engines[EAGER] = PlainEngine(target.plain(), decoding=decoding)
        found.ours.append(EAGER)
    lean = target.backbone.lean is None
    name = LEAN if lean else MODULES
    twin = target.plain()
    twin.backbone = Backbone(target.model.get_decoder(), lean=lean)
    if lean and twin.backbone.lean is None:
        found.left_out[name] = f"there is none for {target.config.model_type}"
        return
    check_target(twin)
    found.engines[name] = PlainEngine(twin, decoding=decoding)
    found.ours.append(name)
