"""Assemble engines from an experiment, and let them answer: once for all studies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.load import to_plain
from falcon_lab.config.saved import DESCRIPTION, opened_drafter
from falcon_lab.config.schema import (
    PLAIN,
    EvaluationConfig,
    Experiment,
    MethodConfig,
    Node,
    PromptsConfig,
)
from falcon_lab.decoding.assembling import (
    KINDS,
    assemble,
    choose_drafter,
    choose_target,
    prepare,
)
from falcon_lab.decoding.engine import Engine as DecodingEngine
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.rounding import read_again
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.drafters.saved import load_drafter, refuse_other_target, saved_node
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Announce, BuildContext, Drafter, EngineContext, is_trainable
from falcon_lab.measure import provenance
from falcon_lab.measure.conversation import EncodedPrompt, encode_prompts
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.measurement import Engine, Measurement, measure
from falcon_lab.measure.prompts import load_prompts
from falcon_lab.measure.results import build_results
from falcon_lab.model.compiled import check_compiler
from falcon_lab.model.loading import resolve_device
from falcon_lab.pretraining.target import TargetAhead, target_ahead
from falcon_lab.pretraining.tuned import weights_of
from falcon_lab.sampling import Sampling
from falcon_lab.timing import torch_threads

if TYPE_CHECKING:
    from falcon_lab.decoding.generation import Generation
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

log = logging.getLogger(__name__)


@dataclass
class Methods:
    """Holds the engines of a measurement that draft, and what is reported about them.

    Attributes:
        engines: method -> engine, in the order of the configuration.
        others: the same of methods that have an engine of their own.
        provenance: method -> kind -> name, distribution and version.
        labels: method -> what it is, in a few words.
        left_out: optional method -> why it is not measured.
    """

    engines: dict[str, SpeculativeEngine] = field(default_factory=dict)
    others: dict[str, Engine] = field(default_factory=dict)
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, Engine]:
        """Every engine, by method."""
        return {**self.engines, **self.others}

    def leave_out_others(self) -> None:
        """Note that a study has no use for engines of their own."""
        for name in self.others:
            self.left_out[name] = "it has an engine of its own, which evaluate alone measures"
        self.others.clear()


@dataclass(frozen=True)
class Setup:
    """Assembles the engines of an experiment, and lets them answer and be measured.

    Attributes:
        experiment: says how.
        target: verifies; as it decodes, on its device and compiled where configured.
        components: builds the parts.
        announce: is called with one line for the user at a time.
        stands_in: whether the target is a stand-in for one that is still to be trained.
    """

    experiment: Experiment
    target: Target
    components: Components
    announce: Announce = log.info
    stands_in: bool = False

    @classmethod
    def load(
        cls,
        experiment: Experiment,
        components: Components,
        announce: Callable[[str], None],
        check: Callable[[Setup], object] | None = None,
    ) -> Setup:
        """Check the whole measurement, then load the target, trained first where need be.

        Args:
            experiment: says how.
            components: builds the parts.
            announce: is called with one line for the user at a time.
            check: of the measurement; None: ``Setup.check``.

        Raises:
            FalconLabError: as ``check``, or the target cannot be loaded.
        """
        ahead = target_ahead(experiment.target, announce, components)
        (check or cls.check)(cls.ahead(experiment, ahead, components))
        target = ahead.itself(experiment.target, announce, components)
        return cls.of(experiment, target, components, announce)

    @classmethod
    def ahead(cls, experiment: Experiment, ahead: TargetAhead, components: Components) -> Setup:
        """Return what checks a measurement before anything is trained: nothing is compiled."""
        eager = replace(experiment, decoding=replace(experiment.decoding, compile="none"))
        target = ahead.target.to(resolve_device(experiment.target.device))
        if experiment.decoding.compile != "none" and target.device.type == "cpu":
            check_compiler()
        return cls(eager, target, components, stands_in=ahead.stands_in)

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        target: Target,
        components: Components,
        announce: Callable[[str], None],
    ) -> Setup:
        """Bring the target to its device and compile it, as the experiment asks."""
        target = target.to(resolve_device(experiment.target.device))
        target = choose_target(target, experiment.decoding, announce)
        return cls(experiment, target, components, announce)

    @property
    def stop(self) -> StopCondition:
        """Return what ends a text."""
        stops = self.experiment.evaluation.stop
        return StopCondition(self.target.eos_ids, stops, self.target.tokenizer)

    @property
    def sampling(self) -> Sampling:
        """Return how tokens are drawn."""
        return sampling_of(self.experiment.evaluation)

    # --- engines --------------------------------------------------------------------------------

    def plain(self) -> PlainEngine:
        """Return plain decoding."""
        return PlainEngine(self.target, decoding=self.experiment.decoding)

    def drafter(self, config: MethodConfig, trained: Path | None = Path()) -> tuple[Drafter, Node]:
        """Build or load the drafter of a method.

        Args:
            config: of the method.
            trained: folder of the run's own drafter; None: it is not trained yet, and a fresh one
                takes its place.

        Returns:
            The drafter, compiled where configured, and the node that describes it.

        Raises:
            FalconLabError: it is not there, or was trained for another target.
        """
        drafter, node = self._made(config, trained), self.node_of(config, trained)
        if config.drafter is not None and is_untrained(drafter):
            self.announce(
                f"{node['name']} has weights that nobody trained, so that its drafts are "
                "rarely accepted; train it by falcon-lab run, and name RUN/drafter"
            )
        return choose_drafter(drafter, self.experiment.decoding, self.announce), node

    def node_of(self, config: MethodConfig, trained: Path | None = Path()) -> Node:
        """Return the node that describes a method's drafter; nothing is built or loaded.

        A part that is saved is described by what is saved there.

        Raises:
            FalconLabError: the drafter is not there.
        """
        if config.drafter is None and config.drafter_path:
            with opened_drafter(config.drafter_path, self.components) as folder:
                return saved_node(folder, self.components)
        if config.drafter is None and trained is not None:
            _refuse_untrained(trained)
            return saved_node(trained, self.components)

        def describe(kind: str, inner: Node) -> Node:
            if (kind, inner["name"]) != ("drafter", "saved"):
                return inner
            return self.node_of(MethodConfig(drafter_path=inner.get("path")), trained)

        node = config.drafter or self.experiment.drafter
        return self.components.replaced("drafter", node, describe)

    def _made(self, config: MethodConfig, trained: Path | None) -> Drafter:
        """Build or load the drafter of a method as ``drafter`` does; nothing is compiled."""
        if config.drafter is None and config.drafter_path:
            with opened_drafter(config.drafter_path, self.components) as folder:
                return self._saved(folder, trained)
        if config.drafter is not None or trained is None:
            return self._built(config.drafter or self.experiment.drafter, trained)
        _refuse_untrained(trained)
        return self._saved(trained, trained)

    def _saved(self, folder: Path, trained: Path | None) -> Drafter:
        """Load a saved drafter, or build one like it where the target is a stand-in."""
        if not self.stands_in:
            return load_drafter(folder, self.target, self.components)
        node = saved_node(folder, self.components)
        refuse_other_target(folder, self.target)
        return self._built(node, trained)

    def _built(self, node: Node, trained: Path | None) -> Drafter:
        """Build the drafter of a node, with its parts that are saved."""

        def saved(path: str | None) -> Drafter:
            return self._made(MethodConfig(drafter_path=path), trained)

        context = BuildContext(host=self.target, saved=saved)
        drafter: Drafter = self.components.build("drafter", node, context)
        return drafter

    def engine(self, drafter: Drafter, nodes: Mapping[str, Node]) -> SpeculativeEngine:
        """Build the engine of a drafter, compiled where ``decoding.compile`` asks for it.

        Args:
            drafter: one that is there; several engines may share it.
            nodes: ``tree``, ``acceptance`` and ``controller``.
        """
        decoding = self.experiment.decoding
        engine = assemble(self.target, drafter, nodes, self.components, decoding=decoding)
        if decoding.compile != "none":
            with torch_threads(self.experiment.evaluation.threads):
                prepare(engine)
        return engine

    def methods(self, trained: Path | None = Path()) -> Methods:
        """Build every method of the experiment.

        Args:
            trained: folder of the run's own drafter, as of ``drafter``.

        Raises:
            FalconLabError: a part is not there, and its method is not optional.
        """
        methods = Methods()
        for name, config in self.experiment.evaluation.methods.items():
            add = self.add if config.engine is None else self.add_other
            try:
                add(methods, name, config, trained)
            except FalconLabError as error:
                if not config.optional:
                    raise
                methods.left_out[name] = str(error)
        return methods

    def add(
        self, methods: Methods, name: str, config: MethodConfig, trained: Path | None = Path()
    ) -> SpeculativeEngine:
        """Build one method's engine, and write down what it is made of."""
        drafter, node = self.drafter(config, trained)
        nodes = {key: getattr(config, key) or getattr(self.experiment, key) for key in KINDS}
        methods.engines[name] = self.engine(drafter, nodes)
        methods.provenance[name] = self.provenance(node, nodes, compiled=drafter.is_compiled)
        described = label(node, drafter.block, nodes["tree"], nodes["controller"])
        untrained = config.drafter is not None and is_untrained(drafter)
        methods.labels[name] = f"{described}, untrained" if untrained else described
        return methods.engines[name]

    def add_other(
        self, methods: Methods, name: str, config: MethodConfig, trained: Path | None = None
    ) -> None:
        """Build one method's engine of its own, and write down what it is.

        Raises:
            FalconLabError: its plug-in is not there, or gave none.
        """
        assert config.engine is not None
        context = EngineContext(self.target, self.experiment.decoding)
        engine = self.components.build("engine", config.engine, context)
        if not isinstance(engine, DecodingEngine):
            owner = self.components.owner("engine", config.engine["name"])
            raise FalconLabError(
                f"engine {config.engine['name']} of {owner} is a {type(engine).__name__}; derive "
                "it from falcon_lab.decoding.engine.Engine"
            )
        methods.others[name] = engine
        methods.provenance[name] = {"engine": self.components.provenance("engine", config.engine)}
        methods.labels[name] = config.engine["name"]

    def check(
        self, trained: Path | None = Path(), temperatures: Sequence[float] | None = None
    ) -> None:
        """See that everything can be measured: every method answers the first prompt for a bit.

        Args:
            trained: folder of the run's own drafter, as of ``drafter``.
            temperatures: that are measured; None: the experiment's.

        Raises:
            FalconLabError: prompts, a method or the way to sample cannot be used.
        """
        with torch.random.fork_rng(devices=[]):
            prompts = self.prompts()
            engines = {PLAIN: self.plain(), **self.methods(trained).all}
            self.rehearse(engines, prompts, temperatures)

    def rehearse(
        self,
        engines: Mapping[str, Engine],
        prompts: Sequence[EncodedPrompt],
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """Let every engine answer the beginning of the first prompt with a few tokens.

        Args:
            engines: method -> engine.
            prompts: of the measurement.
            temperatures: that are measured; None: the experiment's.

        Raises:
            FalconLabError: an engine cannot decode so.
        """
        evaluation = self.experiment.evaluation
        measured = [evaluation.temperature] if temperatures is None else temperatures
        bit = EncodedBit(prompts[0].tokens([])[:BIT])
        for (name, engine), temperature in product(engines.items(), measured):
            config = replace(evaluation, temperature=temperature)
            try:
                self.answer(engine, bit, tokens=BIT // 2, config=config)
            except FalconLabError as error:
                raise FalconLabError(f"{name}: {error}") from error

    def provenance(
        self, node: Node, nodes: Mapping[str, Node], *, compiled: bool
    ) -> dict[str, Any]:
        """Return kind of component -> name, distribution and version.

        Args:
            node: of the drafter.
            nodes: of tree, acceptance and controller.
            compiled: whether the drafter is, which is reported too.
        """
        made = self.components.provenance("drafter", node)
        return {"drafter": {**made, "compiled": compiled}} | {
            key: self.components.provenance(KINDS[key], nodes[key]) for key in KINDS
        }

    # --- prompts and answers --------------------------------------------------------------------

    def prompts(self, config: PromptsConfig | None = None) -> list[EncodedPrompt]:
        """Return the prompts of the measurement, ready to be decoded.

        Args:
            config: which ones; None: those of the experiment.

        Raises:
            FalconLabError: there is no such set of prompts, or nothing in it.
        """
        prompts = load_prompts(
            config or self.experiment.evaluation.prompts,
            corpus=self.experiment.data.corpus,
            tokenizer=self.target.tokenizer,
            seed=self.experiment.data.seed,
        )
        return encode_prompts(
            prompts,
            self.target.tokenizer,
            device=self.target.device,
            longest=None if self.stands_in else self.target.max_positions,
        )

    def other_prompts(
        self, source: str, limit: int, measured: Sequence[EncodedPrompt]
    ) -> list[EncodedPrompt]:
        """Return prompts to choose trees on, none of which is measured on.

        Args:
            source: the set, as ``evaluation.prompts.name``.
            limit: most of them.
            measured: those of the measurement.

        Raises:
            FalconLabError: some of them are measured on, or there is no such set.
        """
        config = self.experiment.evaluation.prompts
        found = self.prompts(replace(config, name=source, limit=limit, texts=[]))
        taken = {prompt.turns[0] for prompt in measured}
        if shared := [prompt.id for prompt in found if prompt.turns[0] in taken]:
            raise FalconLabError(
                f"prompts of {source}: {shared[0]} is among the prompts that the trees are then "
                "measured on; a tree must not be chosen on them: choose another set to tune on, or "
                "another one in evaluation.prompts"
            )
        return found

    def answer(
        self,
        engine: Any,
        prompt: EncodedPrompt | EncodedBit,
        *,
        answers: Sequence[Sequence[int]] = (),
        tokens: int | None = None,
        config: EvaluationConfig | None = None,
        **options: Any,
    ) -> Generation:
        """Let an engine answer a turn of a prompt once, outside a measurement.

        Args:
            engine: answers.
            prompt: what to.
            answers: to the turns before it.
            tokens: most new ones, where that is fewer than usual.
            config: lengths, sampling and seed; None: the experiment's.
            **options: further arguments of ``engine.generate``.
        """
        config = config or self.experiment.evaluation
        limit = config.max_new_tokens
        answered: Generation = engine.generate(
            prompt.tokens(answers),
            max_new_tokens=limit if tokens is None else min(limit, tokens),
            sampling=sampling_of(config),
            generator=torch.Generator(self.target.device).manual_seed(config.seed),
            stop=self.stop,
            **options,
        )
        return answered

    def measure(
        self,
        engines: Mapping[str, Engine],
        prompts: Sequence[EncodedPrompt],
        config: EvaluationConfig | None = None,
        *,
        hf: Engine | None = None,
        journal: Journal | None = None,
        warm: Collection[str] = (),
    ) -> Measurement:
        """Measure engines as the experiment says; see ``measurement.measure``."""
        return measure(
            engines,
            prompts,
            config or self.experiment.evaluation,
            stop=self.stop,
            hf=hf,
            read=partial(read_again, self.target),
            journal=journal,
            warm=warm,
        )

    def journal(
        self,
        folder: Path,
        kind: str,
        prompts: Sequence[EncodedPrompt],
        facts: Mapping[str, Any],
        config: EvaluationConfig | None = None,
    ) -> Journal:
        """Open the journal of a measurement, and say what is there of it.

        Args:
            folder: of the study.
            kind: begins the file's name.
            prompts: that are answered.
            facts: what decides the measurement beside target, prompts, machine and versions.
            config: lengths, sampling and repeats; None: the experiment's.
        """
        config, target = config or self.experiment.evaluation, self.target
        hardware = provenance.hardware(device=str(target.device), threads=config.threads)
        versions, asked = provenance.versions(), self.experiment.target
        known: dict[str, Any] = {
            "target": provenance.target_of(target) | {"tuning": weights_of(target.tuning)},
            "decoding": [asdict(self.experiment.decoding), asked.attention, asked.lean],
            "evaluation": asdict(config),
            "prompts": [list(prompt.turns) for prompt in prompts],
            "hardware": {key: hardware[key] for key in ("cpu", "gpu", "threads", "device")},
            "versions": {key: versions[key] for key in ("falcon-lab", "torch", "transformers")},
        }
        found = Journal.open(folder, kind, {**known, **facts})
        if found:
            self.announce(f"{len(found)} answers are there from before: {found.path}")
        return found

    def header(self) -> dict[str, Any]:
        """Return what the results' file begins with; ask before measuring."""
        return provenance.header(self.target, threads=self.experiment.evaluation.threads)

    def results(
        self,
        measurement: Measurement,
        methods: Methods,
        header: Mapping[str, Any],
        *,
        quality: Mapping[str, Any] | None = None,
        headline: str | None = None,
    ) -> dict[str, Any]:
        """Return the content of ``results.json``; see ``results.build_results``."""
        return build_results(
            measurement,
            experiment=to_plain(self.experiment),
            target=provenance.target_of(self.target, quality),
            header=header,
            components=methods.provenance,
            labels=methods.labels,
            left_out=methods.left_out,
            headline=headline,
        )


def _refuse_untrained(folder: Path) -> None:
    """Refuse a folder without a drafter.

    Raises:
        FalconLabError: with what to do.
    """
    if not (folder / DESCRIPTION).exists():
        raise FalconLabError(
            f"{folder}: no drafter is trained here yet; run the stages that train one, "
            "stages=[target,data,distil], or give the method a drafter or a drafter_path"
        )


def is_untrained(drafter: Drafter) -> bool:
    """Return whether a drafter that was just built has weights that nobody trained."""
    own = is_trainable(drafter) and not drafter.pretrained
    return own or any(is_untrained(part) for part in drafter.drafters)


BIT = 6
"""Tokens that are read and written to see whether a method decodes at all."""


@dataclass(frozen=True)
class EncodedBit:
    """The beginning of a prompt."""

    ids: torch.Tensor

    def tokens(self, answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the beginning, whatever was answered."""
        return self.ids


def sampling_of(config: EvaluationConfig) -> Sampling:
    """Return how tokens are drawn."""
    return Sampling(config.temperature, config.top_k, config.top_p)


def label(
    node: Mapping[str, Any],
    block: int,
    tree: Mapping[str, Any],
    controller: Mapping[str, Any] | None = None,
) -> str:
    """Describe a method in a few words."""
    name = " and ".join(part["name"] for part in node.get("parts", [])) or node["name"]
    parts = [name, f"k={block}", f"{tree['name']} {_shape(tree)}".rstrip()]
    if controller is not None and controller["name"] != "fixed":
        parts.append(f"{controller['name']} {controller.get('threshold') or ''}".rstrip())
    return ", ".join(parts)


def _shape(tree: Mapping[str, Any]) -> str:
    if "template" in tree:
        return tree["template"] if isinstance(tree["template"], str) else "own template"
    nodes = [f"{tree['nodes']} nodes"] if tree.get("nodes") is not None else []
    return " ".join(nodes + ([f"depth {tree['depth']}"] if tree.get("depth") is not None else []))
