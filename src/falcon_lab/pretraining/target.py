"""Targets by name: registered ones, those of the hub, folders and files.

A registered target is a source, which a plug-in or this package gives: a path, a hub id, or a
recipe by which the target is trained once and kept in the cache under the fingerprint of the
recipe. Its making can be killed at any moment: the same call resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from falcon_lab.config.saved import CHECKPOINTS
from falcon_lab.config.schema import PretrainingConfig, TargetConfig
from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean
from falcon_lab.fields import read_yaml, resolve
from falcon_lab.files import cached, check_place, make_folder, make_once
from falcon_lab.model.gguf_header import is_gguf, read_header
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.quality import JUDGEMENT, read_quality
from falcon_lab.pretraining.questions import Question, digest_of
from falcon_lab.pretraining.tuned import (
    CARD,
    Choices,
    Tuning,
    options_of,
    questions_of,
    read_tuning,
    tuned_folder,
    tuned_name,
)

if TYPE_CHECKING:
    from falcon_lab.interfaces import TargetContext

log = logging.getLogger(__name__)

MOST_NAMES = 1000
"""Names that a mistyped one is compared with."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MADE_OF = ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url")
"""Keys of a GGUF file under which converters write the model that it was made of."""

Announce = Callable[[str], None]
"""Called with one line for the user."""
Make = Callable[[str, PretrainingConfig, Path, Announce], None]
"""Makes the target of a recipe in a folder."""
Source = PretrainingConfig | str
"""Where a target comes from: a recipe, or what ``load_target`` takes as its name."""


def tiny_code(config: None, context: TargetContext) -> PretrainingConfig:
    """Return the recipe of ``tiny-code``, which ships with the package."""
    shipped = resources.files("falcon_lab.pretraining").joinpath("recipes/tiny-code.yaml")
    with resources.as_file(shipped) as path:
        tree, _ = read_yaml(path)
    return resolve(PretrainingConfig, tree)


def source_of(
    config: TargetConfig, announce: Announce = log.info, components: Components | None = None
) -> Source:
    """Return where a target comes from.

    Args:
        config: of the target; its own recipe goes before any name.
        announce: is called with one line for the user.
        components: the registry; None loads what is installed.

    Raises:
        FalconLabError: a registered target gives no source, or refuses to.
    """
    if config.pretraining is not None:
        return config.pretraining
    known = components or load_components()
    if not known.knows("target", config.name):
        return config.name
    from falcon_lab.interfaces import TargetContext

    source = known.build("target", {"name": config.name}, TargetContext(announce))
    if isinstance(source, str | Path):
        return str(source)
    owner = known.find("target", config.name).owner
    if not isinstance(source, PretrainingConfig):
        raise FalconLabError(
            f"target {config.name} is a {type(source).__name__}; its builder must return a path, a "
            f"hub id or a PretrainingConfig ({owner})"
        )
    try:
        return resolve(PretrainingConfig, dataclasses.asdict(source))
    except ConfigError as error:
        raise FalconLabError(f"target {config.name}: its recipe's {error} ({owner})") from error


def recipe_fingerprint(recipe: PretrainingConfig) -> str:
    """Return twelve hex digits that change with whatever changes the weights."""
    from falcon_lab.data.corpora import corpus_fingerprint

    facts = dataclasses.asdict(recipe)
    for judged_later in ("gate", "checkpoint_every"):
        del facts[judged_later]
    facts["corpus_fingerprint"] = corpus_fingerprint(recipe.corpus)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def target_folder(name: str, recipe: PretrainingConfig) -> Path:
    """Return the folder of the finished target of a recipe."""
    return cached("targets", name, recipe_fingerprint(recipe))


def place_of_target(config: TargetConfig, components: Components | None = None) -> str:
    """Return where other programs find a target: a hub id, or the path of a folder or a file.

    Raises:
        FalconLabError: as ``source_of``.
    """
    source = source_of(config, components=components)
    if isinstance(source, PretrainingConfig):
        return str(target_folder(config.name, source))
    return str(Path(source).resolve()) if Path(source).exists() else source


def hub_id_of_target(config: TargetConfig, components: Components | None = None) -> str | None:
    """Return the hub id by which the world knows a target; None where nobody says one.

    A registered target says its own, a GGUF file the repository that it was made of.

    Raises:
        FalconLabError: as ``source_of``; or a GGUF file is damaged.
    """
    known = components or load_components()
    if config.tune is not None:
        return None
    if config.pretraining is None and known.knows("target", config.name):
        said = known.find("target", config.name).published
        if said is not None:
            return said
    place = place_of_target(config, known)
    if not Path(place).exists():
        return place if HUB_ID.fullmatch(place) else None
    if not is_gguf(place):
        return None
    values = read_header(Path(place)).values
    for key in MADE_OF:
        said = str(values.get(key, "")).removeprefix("https://huggingface.co/").strip("/")
        if HUB_ID.fullmatch(said):
            return said
    return None


def ensure_target(
    config: TargetConfig, announce: Announce = log.info, components: Components | None = None
) -> Any:
    """Load the target of a configuration; train it first if need be.

    Args:
        config: of the target.
        announce: is called with one line for the user.
        components: the registry; None loads what is installed.

    Raises:
        FalconLabError: when it cannot be loaded, with the reason.
    """
    known = components or load_components()
    return _made_and_loaded(config, source_of(config, announce, known), announce, known)


def _made_and_loaded(
    config: TargetConfig, source: Source, announce: Announce, known: Components
) -> Any:
    """Load the target of a source; train it first if need be, and tune it."""
    if config.tune is not None:
        return _load_tuned(config, _tuned_once(config, source, announce, known), announce)
    if source == config.name:
        with near_names_said(config.name, known):
            return _load(config, source, announce)
    again = ""
    if isinstance(source, PretrainingConfig):
        folder = target_folder(config.name, source)
        ensure_pretrained(config.name, source, folder, announce)
        source, again = str(folder), f" (made here; anew where {folder} is removed)"
    try:
        return _load(config, source, announce)
    except FalconLabError as error:
        raise FalconLabError(f"target {config.name}{again}: {error}") from error


def _tuned_once(
    config: TargetConfig, source: Source, announce: Announce, known: Components
) -> Path:
    """Return the folder of the tuned target of a configuration; tune its parent if need be.

    What its card lacks of the questions that the configuration asks is measured.
    """
    folder = _tuned_alone(config, source, announce, known)
    card, questions = read_tuning(folder), questions_of(config)
    if card is not None and card.lacks(questions):
        name = tuned_name(config)
        announce(f"target {name}: {len(questions):,} multiple-choice questions, kept in its card")
        _with_answers(card, questions, config, source, folder, announce, known).write(folder)
    return folder


def _with_answers(
    card: Tuning,
    questions: Sequence[Question],
    config: TargetConfig,
    source: Source,
    folder: Path,
    announce: Announce,
    known: Components,
) -> Tuning:
    """Return the card with what parent and tuned target answer, one after the other in float32."""
    from falcon_lab.pretraining.accuracy import answers, paired

    plain = dataclasses.replace(_of_parent(config), dtype="float32", device=config.device)
    parent = answers(_made_and_loaded(plain, source, announce, known), questions, "parent")
    tuned = answers(_load(plain, str(folder), announce), questions, "tuned target")
    options = options_of(config.tune or {})
    asked = {"choices": options.choices, "choices_limit": options.choices_limit}
    choices = Choices(
        str(options.choices),
        digest_of(questions),
        len(questions),
        acc=paired(parent.acc, tuned.acc),
        acc_norm=paired(parent.acc_norm, tuned.acc_norm),
    )
    completed = dataclasses.replace(card, tuner=card.tuner | asked, choices=choices)
    announce(completed.sentence)
    return completed


def _tuned_alone(
    config: TargetConfig, source: Source, announce: Announce, known: Components
) -> Path:
    """Return the folder of the tuned target of a configuration; tune its parent if need be.

    The parent is gone then: there may be no room for two.
    """
    parent = _made_and_loaded(_of_parent(config), source, announce, known)
    folder = tuned_folder(config, parent.fingerprint)

    def make(partial: Path) -> None:
        from falcon_lab.pretraining.tuning import tune

        node = config.tune or {}
        announce(f"target {tuned_name(config)}: tuning it once, kept in {folder}")
        owner = known.provenance("tuner", node)
        tune(parent, _tuner(config, announce, known), node, partial, announce, owner)

    if read_tuning(folder) is None:
        check_place(folder / CARD, folder=False)
    make_once(folder, make, is_finished=lambda place: read_tuning(place) is not None)
    return folder


def _of_parent(config: TargetConfig) -> TargetConfig:
    """Return how the parent of a tuned target is loaded: in its own precision, to be trained."""
    attention = config.attention if config.attention in ("sdpa", "eager") else "sdpa"
    return dataclasses.replace(
        config, tune=None, dtype="auto", device="cpu", lean=False, attention=attention
    )


def _tuner(config: TargetConfig, announce: Announce, known: Components) -> Any:
    from falcon_lab.interfaces import TargetContext

    return known.build("tuner", config.tune or {}, TargetContext(announce))


def _load_tuned(config: TargetConfig, folder: Path, announce: Announce) -> Any:
    """Load a finished tuned target, under its own name and with its card.

    Raises:
        FalconLabError: it cannot be loaded.
    """
    try:
        target = _load(config, str(folder), announce)
    except FalconLabError as error:
        again = f"tuned here; anew where {folder} is removed"
        raise FalconLabError(f"target {tuned_name(config)} ({again}): {error}") from error
    card = read_tuning(folder)
    target.name = tuned_name(config)
    target.tuning = None if card is None else dataclasses.asdict(card)
    return target


def _untuned_stand_in(parent: Any, config: TargetConfig, known: Components) -> Any:
    """Return what a target is before it is tuned, with all that a tuner adds to it.

    Raises:
        FalconLabError: it could not be tuned.
    """
    from falcon_lab.model.target import Target
    from falcon_lab.pretraining.tuning import check_training, tuning_data

    tuning_data(parent, options_of(config.tune or {})).check()
    tuner = _tuner(config, log.info, known)
    check_training(tuner.begin(parent.model, parent.tokenizer))
    name = tuned_name(config)
    return Target(tuner.finish(), parent.tokenizer, name=name, lean=config.lean)


def _load(config: TargetConfig, place: str, announce: Announce) -> Any:
    """Load the model of a place, under the name of the configuration."""
    from falcon_lab.model.loading import load_target

    target = load_target(
        dataclasses.replace(config, name=place, pretraining=None, tune=None), announce
    )
    target.name = config.name
    return target


@contextmanager
def near_names_said(name: str, components: Components) -> Iterator[None]:
    """Say in an error about a target that is nowhere what else it might be called.

    Raises:
        FalconLabError: as inside the block.
    """
    try:
        yield
    except FalconLabError as error:
        if os.path.lexists(name):
            raise
        registered = components.names("target")
        meant = did_you_mean(name, [*registered, *models_beside(name), *models_fetched()])
        if "did you mean" not in meant:
            meant = f"; registered: {', '.join(registered)}"
        raise FalconLabError(f"{error}{meant}") from error


def models_beside(name: str) -> list[str]:
    """Return the folders of models and the GGUF files where a path should have led."""
    try:
        there = list(islice(Path(name).parent.iterdir(), MOST_NAMES))
        return [str(p) for p in there if p.suffix == ".gguf" or (p / "config.json").is_file()]
    except (OSError, ValueError):
        return []


def models_fetched() -> list[str]:
    """Return the hub ids of models that are in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = islice(Path(HF_HUB_CACHE).glob("models--*--*"), MOST_NAMES)
    return ["/".join(folder.name.split("--")[1:]) for folder in folders]


@dataclasses.dataclass(frozen=True)
class TargetAhead:
    """What is known of a target before anything is trained.

    Attributes:
        target: itself, where it need not be trained; else a stand-in of its shape with random
            weights and a tokenizer that knows bytes alone.
        stands_in: whether it is a stand-in; or itself, of which something is still to be measured.
    """

    target: Any
    stands_in: bool

    def itself(
        self,
        config: TargetConfig,
        announce: Announce = log.info,
        components: Components | None = None,
    ) -> Any:
        """Return the target, trained and loaded now where it was not; see ``ensure_target``."""
        return ensure_target(config, announce, components) if self.stands_in else self.target


def target_ahead(
    config: TargetConfig, announce: Announce = log.info, components: Components | None = None
) -> TargetAhead:
    """Load the target as ``ensure_target``, or a stand-in for one that is still to be trained.

    Raises:
        FalconLabError: it cannot be loaded, or could not be trained.
    """
    from falcon_lab.model.loading import resolve_device

    resolve_device(config.device)
    known = components or load_components()
    if config.tune is not None:
        return _tuned_ahead(config, announce, known)
    source = source_of(config, announce, known)
    if isinstance(source, PretrainingConfig):
        folder = target_folder(config.name, source)
        if not is_finished(folder):
            check_place(folder, folder=True)
            return TargetAhead(_stand_in(config, source, announce), stands_in=True)
    return TargetAhead(_made_and_loaded(config, source, announce, known), stands_in=False)


def _tuned_ahead(config: TargetConfig, announce: Announce, known: Components) -> TargetAhead:
    """Load a tuned target, or make a stand-in for one that is still to be tuned.

    One that has not answered all questions stands in for itself.
    """
    from falcon_lab.pretraining.accuracy import encoded

    questions = questions_of(config)
    parent = target_ahead(dataclasses.replace(config, tune=None), announce, known)
    if not parent.stands_in:
        encoded(questions, parent.target)
        folder = tuned_folder(config, parent.target.fingerprint)
        if (card := read_tuning(folder)) is not None:
            tuned = _load_tuned(config, folder, announce)
            return TargetAhead(tuned, stands_in=card.lacks(questions))
        check_place(folder, folder=True)
    return TargetAhead(_untuned_stand_in(parent.target, config, known), stands_in=True)


def _stand_in(config: TargetConfig, recipe: PretrainingConfig, announce: Announce) -> Any:
    """Return an untrained target of a recipe's shape."""
    from falcon_lab.pretraining.training import save_stand_in

    with TemporaryDirectory(prefix="falcon-lab-") as place:
        save_stand_in(recipe, Path(place))
        return _load(config, place, announce)


def ensure_pretrained(
    name: str,
    recipe: PretrainingConfig,
    folder: Path,
    announce: Announce,
    make: Make | None = None,
) -> None:
    """Train the target unless ``folder`` has it already, as ``make_once`` does.

    Args:
        name: of the target, for messages.
        recipe: what is made.
        folder: of the finished target.
        announce: is called with one line for the user.
        make: makes the target; None: ``train_target``.
    """

    def train(partial: Path) -> None:
        announce(f"target {name}: training it once ({recipe.steps} steps), kept in {folder}")
        (make or train_target)(name, recipe, partial, announce)
        shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)

    if not is_finished(folder):
        check_place(folder / JUDGEMENT, folder=False)
    make_once(folder, train, is_finished=is_finished)


def is_finished(folder: Path) -> bool:
    """Return whether the folder has a target with its judgement, which is written last."""
    return read_quality(folder) is not None


def train_target(name: str, recipe: PretrainingConfig, folder: Path, announce: Announce) -> None:
    """Make tokenizer and model, train and judge: a Hugging Face folder with quality.json."""
    from falcon_lab.pretraining.training import judged_quality, trained_model, trained_tokenizer

    make_folder(folder)
    tokenizer = trained_tokenizer(recipe, folder)
    model = trained_model(recipe, tokenizer, folder)
    quality = judged_quality(name, recipe, model, tokenizer, folder)
    announce(f"target {name}: {quality.sentence}")


def stored_quality(
    config: TargetConfig, components: Components | None = None
) -> dict[str, Any] | None:
    """Return ``quality.json`` of a pre-trained target, or None for one loaded from elsewhere."""
    source = source_of(config, components=components)
    if config.tune is not None:
        return None  # of its parent
    if not isinstance(source, PretrainingConfig):
        return None
    found = read_quality(target_folder(config.name, source))
    return None if found is None else found.as_dict()
