"""From a row of ``evaluation.methods`` to an engine that decodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.schema import Experiment, MethodConfig, Node
from falcon_lab.decoding.compiling import choose_drafter, prepare
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.drafters.saved import load_drafter, read_config
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Announce, BuildContext, Drafter
from falcon_lab.measure.conversation import EncodedPrompt, encode_prompts
from falcon_lab.measure.metrics import NextLogits
from falcon_lab.measure.prompts import load_prompts
from falcon_lab.sampling import Sampling
from falcon_lab.timing import torch_threads

if TYPE_CHECKING:
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

log = logging.getLogger(__name__)

KINDS = {
    "tree": "tree_builder",
    "acceptance": "acceptance_rule",
    "controller": "controller",
}
"""Key of the configuration -> kind of component."""


@dataclass
class Methods:
    """The engines of an evaluation.

    Attributes:
        engines: method -> engine, in the order of the configuration.
        provenance: method -> kind -> name, distribution and version.
        labels: method -> what it is, in a few words.
        left_out: optional method -> why it is not measured.
    """

    engines: dict[str, SpeculativeEngine] = field(default_factory=dict)
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def build_methods(
    experiment: Experiment,
    target: Target,
    components: Components,
    trained: Path,
    announce: Announce = log.info,
) -> Methods:
    """Every method of the experiment; ``trained`` is the folder of the run's own drafter.

    Raises:
        FalconLabError: a part that is not there, unless its method is optional.
    """
    methods = Methods()
    for name, config in experiment.evaluation.methods.items():
        try:
            add_method(methods, name, config, experiment, target, components, trained, announce)
        except FalconLabError as error:
            if not config.optional:
                raise
            methods.left_out[name] = str(error)
    return methods


def add_method(
    methods: Methods,
    name: str,
    config: MethodConfig,
    experiment: Experiment,
    target: Target,
    components: Components,
    trained: Path,
    announce: Announce = log.info,
) -> None:
    """Build one method's engine and write down what it is made of."""
    drafter, node = drafter_of(config, target, components, trained)
    nodes: dict[str, Node] = {
        "tree": config.tree or experiment.tree,
        "acceptance": config.acceptance or experiment.acceptance,
        "controller": config.controller or experiment.controller,
    }
    drafting = choose_drafter(drafter, experiment.decoding, announce)
    methods.engines[name] = engine_of(drafting, nodes, experiment, target, components)
    methods.provenance[name] = provenance_of(drafting, node, nodes, components)
    methods.labels[name] = label(node, drafter.block, nodes["tree"], nodes["controller"])


def provenance_of(
    drafter: Drafter, node: Node, nodes: Mapping[str, Node], components: Components
) -> dict[str, Any]:
    """Kind of component -> name, distribution and version; the drafter's also whether it is
    compiled.

    Args:
        drafter: the object.
        node: its own.
        nodes: of tree, acceptance and controller.
        components: the registry.
    """
    made = components.provenance("drafter", node)
    return {"drafter": {**made, "compiled": drafter.is_compiled}} | {
        key: components.provenance(KINDS[key], nodes[key]) for key in KINDS
    }


def engine_of(
    drafter: Drafter,
    nodes: Mapping[str, Node],
    experiment: Experiment,
    target: Target,
    components: Components,
) -> SpeculativeEngine:
    """The engine of a drafter, compiled where ``decoding.compile`` asks for it.

    Args:
        drafter: one that is there; several engines may share it.
        nodes: ``tree``, ``acceptance`` and ``controller``.
        experiment: says how to decode.
        target: verifies.
        components: builds the parts.
    """
    context = BuildContext.of(target, drafter)
    built = {key: components.build(KINDS[key], nodes[key], context) for key in KINDS}
    engine = SpeculativeEngine(
        target,
        drafter,
        built["tree"],
        built["acceptance"],
        built["controller"],
        decoding=experiment.decoding,
    )
    if experiment.decoding.compile != "none":
        with torch_threads(experiment.evaluation.threads):
            prepare(engine)
    return engine


def drafter_of(
    config: MethodConfig, target: Target, components: Components, trained: Path
) -> tuple[Drafter, Node]:
    """The drafter of a method and the node that describes it."""
    if config.drafter is not None:
        context = BuildContext(host=target)
        return components.build("drafter", config.drafter, context), config.drafter
    folder = Path(config.drafter_path) if config.drafter_path else trained
    drafter = load_drafter(folder, target, components)
    return drafter, read_config(folder)["drafter"]


def label(
    node: Mapping[str, Any],
    block: int,
    tree: Mapping[str, Any],
    controller: Mapping[str, Any] | None = None,
) -> str:
    """A method in a few words."""
    parts = [node["name"], f"k={block}", f"{tree['name']} {_shape(tree)}".rstrip()]
    if controller is not None and controller["name"] != "fixed":
        parts.append(f"{controller['name']} {controller.get('threshold', '')}".rstrip())
    return ", ".join(parts)


def _shape(tree: Mapping[str, Any]) -> str:
    if "template" in tree:
        return tree["template"] if isinstance(tree["template"], str) else "own template"
    nodes = [f"{tree['nodes']} nodes"] if tree.get("nodes") is not None else []
    return " ".join(nodes + ([f"depth {tree['depth']}"] if tree.get("depth") is not None else []))


def prompts_of(experiment: Experiment, target: Target) -> list[EncodedPrompt]:
    """What is asked, ready to be decoded.

    Raises:
        FalconLabError: there is no such set of prompts, or nothing in it.
    """
    prompts = load_prompts(
        experiment.evaluation.prompts,
        corpus=experiment.data.corpus,
        tokenizer=target.tokenizer,
        seed=experiment.data.seed,
    )
    return encode_prompts(prompts, target.tokenizer, device=target.device)


def other_prompts(
    experiment: Experiment,
    target: Target,
    source: str,
    limit: int,
    measured: Sequence[EncodedPrompt],
) -> list[EncodedPrompt]:
    """Prompts to choose trees on, none of which is measured on.

    Args:
        experiment: says how prompts are made.
        target: encodes them.
        source: the set, as ``evaluation.prompts.name``.
        limit: most of them.
        measured: those of the measurement.

    Raises:
        FalconLabError: some of them are measured on, or there is no such set.
    """
    asked = replace(experiment.evaluation.prompts, name=source, limit=limit, texts=[])
    evaluation = replace(experiment.evaluation, prompts=asked)
    found = prompts_of(replace(experiment, evaluation=evaluation), target)
    taken = {prompt.turns[0] for prompt in measured}
    if shared := [prompt.id for prompt in found if prompt.turns[0] in taken]:
        raise FalconLabError(
            f"prompts of {source}: {shared[0]} is among the prompts that the trees are then "
            "measured on; a tree must not be chosen on them: choose another set to tune on, or "
            "another one in evaluation.prompts"
        )
    return found


def next_logits(target: Target) -> NextLogits:
    """The target's logits of what follows a sequence, read from the start."""
    return lambda tokens: target.prefill(tokens, target.new_cache(len(tokens))).logits[-1]


def stop_of(experiment: Experiment, target: Target) -> StopCondition:
    """What ends a text."""
    return StopCondition(target.eos_ids, experiment.evaluation.stop, target.tokenizer)


def sampling_of(experiment: Experiment) -> Sampling:
    """How tokens are drawn."""
    config = experiment.evaluation
    return Sampling(config.temperature, config.top_k, config.top_p)
