"""The plug-in API: one hook.

A plug-in is an installed distribution with an entry point in the group ``falcon_lab`` that names
a module, and in that module::

    from falcon_lab import hookimpl

    @hookimpl
    def register_components(register):
        register.drafter("medusa", "my_package.medusa:build", config=MedusaConfig)

``falcon_lab.interfaces`` has the class of each kind of component.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import pluggy

from falcon_lab.fields import LONGEST_NAME, any_seed, choice, filled, ranged

PROJECT = "falcon_lab"
BUILT_IN = "falcon-lab"
"""The distribution of the components whose names no other takes."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass
class DraftVocabularyOption:
    """The option of a drafter that may propose the most frequent tokens alone."""

    draft_vocabulary: int | None = ranged(None, least=1, most=2**24)
    """Tokens that it trains and drafts over, n: the most frequent ones of the answers that it is
    trained on, with all special ones; null is all of the target's. (EAGLE-3's ``d2t``; FR-Spec,
    arXiv 2502.14856.)"""


@dataclass
class LayerOptions:
    """The options of a drafter whose layers are of its own kind, in the target's sizes or others.

    What others have trained has sizes of its own; ``falcon-lab import`` sets these.
    """

    heads: int | None = ranged(None, least=1, most=1024)
    """Attention heads; null is as many as the target has."""
    groups: int | None = ranged(None, least=1, most=1024)
    """Heads of keys and values; null is as many as the target has."""
    head_size: int | None = ranged(None, least=2, most=2**16)
    """Channels of a head; null is the target's."""
    intermediate: int | None = ranged(None, least=1, most=2**20)
    """Width of feed-forward layers; null is the target's."""
    rope_base: float = ranged(10_000.0, above=1, most=1e12)
    """Base of the rotary frequencies."""


@dataclass
class TuningOptions:
    """The options that every tuner has: what it reads, and how long it trains.

    A tuner's own options derive from these; falcon-lab itself goes by them.
    """

    corpus: str | None = filled(None, "name one, or write null")
    """As ``data.corpus``; null is the experiment's, with its chat template."""
    chat_template: str | None = filled(None, "name a file, or write null")
    """As ``data.chat_template``, of a corpus of its own."""
    documents: int = ranged(100_000, least=1, most=10**9)
    """Documents that are generated, or read at the most."""
    length: int = ranged(256, least=8, most=2**20)
    """Tokens of a packed sequence."""
    batch_size: int = ranged(4, least=1, most=2**16)
    """Sequences of a step."""
    validation: int = ranged(16, least=1, most=10**6)
    """Packed sequences that perplexity is measured on, before and after."""
    max_steps: int = ranged(300, least=1, most=10**9)
    lr: float = ranged(5e-5, above=0, most=100)
    """Of AdamW, after a linear warm-up; it falls as half a cosine."""
    warmup_steps: int = ranged(20, least=0, most=10**9)
    weight_decay: float = ranged(0.0, least=0, most=100)
    gradient_clip_val: float = ranged(1.0, above=0, most=1e6)
    precision: str = choice("32-true", ("32-true", "bf16-mixed"))
    """Of the passes, as ``trainer.precision``; weights are in float32 while they are trained."""
    seed: int = any_seed()
    checkpoint_every: int = ranged(100, least=1, most=10**9)
    """Steps between resumable checkpoints."""
    choices: str | None = filled(None, "name a file, or write null")
    """A JSONL of multiple-choice questions, ``{"ctx": …, "endings": […], "label": 0}``, that the
    target answers before and after; they decide no weight, and may be added later."""
    choices_limit: int | None = ranged(None, least=1, most=10**9)
    """Questions that are asked, evenly spread over the file; null is all."""


Builder = Callable[..., Any] | str
"""``build(config, context: BuildContext)``, or ``"package.module:name"`` of it, imported when the
component is first built (so that listing plug-ins imports no torch). A target's and a tuner's
context is a ``TargetContext``."""


KINDS = (
    "target",
    "tuner",
    "drafter",
    "schedule",
    "tree_builder",
    "template",
    "acceptance_rule",
    "controller",
    "objective",
    "engine",
    "saved_drafter",
    "corpus",
)
"""The kinds of components, in the order in which they are listed."""

BROUGHT = ("saved_drafter", "corpus")
"""Those that are files of a distribution: nothing is built, and they have no options."""


@dataclass(frozen=True)
class Component:
    """One registered component and where it came from."""

    kind: str
    name: str
    build: Builder | Path
    config: type | None
    distribution: str
    version: str
    entry_point: str = ""
    exports: tuple[tuple[str, Builder], ...] = ()
    """Of a drafter: format of another program -> its ``ExportFormat``, made without arguments."""
    imports: Builder | None = None
    """Of a drafter: its ``ImportFormat``."""
    published: str | None = None
    """Of a target: the hub id by which the world knows it."""

    @property
    def full_name(self) -> str:
        """The name that no other distribution can take."""
        return f"{self.distribution}/{self.name}"

    @property
    def path(self) -> Path:
        """Where it lies, of a kind that is files."""
        assert isinstance(self.build, Path)
        return self.build

    @property
    def owner(self) -> str:
        """Whose it is, for messages."""
        return owner_of(self.distribution, self.version, self.entry_point)

    @property
    def built_in(self) -> bool:
        """Whether it comes with falcon-lab itself, and through no entry point."""
        return self.distribution == BUILT_IN and not self.entry_point


def owner_of(distribution: str, version: str, entry_point: str) -> str:
    """Return whom a plug-in belongs to, for messages."""
    through = f" (entry point {entry_point})" if entry_point else ""
    return f"{distribution} {version}".strip() + through


class Register:
    """What the hook is given: one method per kind of component.

    ``name`` is what a YAML says; ``config`` is the dataclass of the component's other keys (None:
    it has none). What is a file has a ``path`` in place of both. A new kind of component adds a
    method here, never a hook.

    Attributes:
        components: what has been registered.

    Args:
        distribution: that the plug-in belongs to.
        version: of that distribution.
        entry_point: of the plug-in in its distribution; "" for what ships with falcon-lab.
    """

    def __init__(self, distribution: str, version: str, entry_point: str = "") -> None:
        self.components: list[Component] = []
        self._origin = distribution, version, entry_point

    def target(
        self,
        name: str,
        build: Builder,
        *,
        config: type | None = None,
        published: str | None = None,
    ) -> None:
        """Add a target that ``target.name`` can be given by name.

        Built, with a ``TargetContext``, it is where the model comes from: the ``Path`` of a GGUF
        file or of a Hugging Face folder, a hub id, or the recipe (``PretrainingConfig``) by which
        it is trained once. ``published`` is the hub id by which the world knows the model, which
        cards of drafters for it name.
        """
        self._add("target", name, build, config)
        if published is not None:
            known = replace(self.components[-1], published=str(published))
            self.components[-1] = known

    def tuner(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add a ``TargetTuner``, which makes a target of another one (``target.tune``).

        ``config`` derives from ``TuningOptions``. It is built with a ``TargetContext``.
        """
        self._add("tuner", name, build, config)

    def drafter(
        self,
        name: str,
        build: Builder,
        *,
        config: type | None = None,
        exports: Mapping[str, Builder] | None = None,
        imports: Builder | None = None,
    ) -> None:
        """Add a ``Drafter``.

        ``exports`` says as what ``falcon-lab export`` can write one that was trained: name of a
        format -> a subclass of ``ExportFormat``. ``imports`` is a subclass of ``ImportFormat``, by
        which ``falcon-lab import`` reads those that others have trained.
        """
        self._add("drafter", name, build, config, exports, imports)

    def schedule(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add a ``GlancingSchedule``."""
        self._add("schedule", name, build, config)

    def tree_builder(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add a ``TreeBuilder``."""
        self._add("tree_builder", name, build, config)

    def template(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add a tree that the builder ``static`` can be given by name.

        Built, it is what a YAML may write out: a mapping from node to child count, or a list of
        nodes.
        """
        self._add("template", name, build, config)

    def acceptance_rule(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add an ``AcceptanceRule``."""
        self._add("acceptance_rule", name, build, config)

    def controller(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add a ``LengthController``."""
        self._add("controller", name, build, config)

    def objective(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add an ``Objective``."""
        self._add("objective", name, build, config)

    def engine(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """Add a decoding loop of one's own, for methods that are none of speculation by components.

        Built, with an ``EngineContext``, it is a ``falcon_lab.decoding.engine.Engine``, as
        ``PartEngine`` in ``decoding/plain.py`` is one. A method of ``evaluation.methods`` names it
        by ``engine``; one that is not lossless is called so in every table.
        """
        self._add("engine", name, build, config)

    def saved_drafter(self, name: str, path: Path | str) -> None:
        """Add a drafter that was trained: the folder that ``save_drafter`` wrote, in the package.

        It goes by that name wherever the folder of a saved drafter can be named.
        """
        self._add("saved_drafter", name, self._absolute(path), None)

    def corpus(self, name: str, path: Path | str) -> None:
        """Add a corpus for ``data.corpus``: a file or a folder of what it can be given by path."""
        self._add("corpus", name, self._absolute(path), None)

    @staticmethod
    def _absolute(path: Path | str) -> Path:
        if not isinstance(path, str | os.PathLike) or not Path(path).is_absolute():
            raise ValueError(f"{path!r} is no absolute path; begin with Path(__file__).parent")
        return Path(path)

    def _add(
        self,
        kind: str,
        name: str,
        build: Builder | Path,
        config: type | None,
        exports: Mapping[str, Builder] | None = None,
        imports: Builder | None = None,
    ) -> None:
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)):
            raise ValueError(f"{kind} name {name!r}: use letters, digits, '-', '_' and '.'")
        if len(name) > LONGEST_NAME:
            raise ValueError(f"{kind} name {name[:20]}…: use at most {LONGEST_NAME} characters")
        if any(c.kind == kind and c.name == name for c in self.components):
            raise ValueError(f"{kind} {name!r} is registered twice")
        if config is not None and not (isinstance(config, type) and is_dataclass(config)):
            raise ValueError(f"{kind} {name!r}: config must be a dataclass, not {config!r}")
        formats = tuple((exports or {}).items())
        readers = () if imports is None else (imports,)
        for each in (build, *(made for _, made in formats), *readers):
            named = isinstance(each, str) and re.fullmatch(r"[\w.]+:[\w.]+", each)
            if not (isinstance(each, Path) or callable(each) or named):
                raise ValueError(f"{kind} {name!r}: build must be callable or 'module:name'")
        name = str.__str__(name)  # of an enumeration, or of a class that compares otherwise
        made = Component(kind, name, build, config, *self._origin, formats, imports)
        self.components.append(made)


@hookspec
def register_components(register: Register) -> None:
    """Add components: call ``register.<kind>(name, build, config=Dataclass)`` once for each."""
