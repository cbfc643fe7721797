"""Plain values checked against a dataclass, with the full key of whatever is wrong.

A field may limit its values beside its default: ``depth: int = ranged(4, least=0, most=1000)``,
``proposal: str = choice("deterministic", ("deterministic", "sampled"))``. Whole numbers fit 64 bits
and others are finite, whatever a field says. The experiment's schema and the options of every
component are checked in this one way. A ``__post_init__`` that compares fields with each other
raises ``ValueError``, or ``ConfigError`` with the name of the wrong field.

Everything that touches OmegaConf is here and in no other file, and no ``DictConfig`` leaves it:
what goes in and comes out are plain dicts, lists, scalars and dataclasses.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from io import StringIO
from itertools import chain
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean, first_line, join
from falcon_lab.files import about, check_text
from falcon_lab.stored import read_bounded

T = TypeVar("T")

# --- limits -------------------------------------------------------------------------------------

LARGEST = 2**63 - 1
"""Largest whole number that torch holds."""

LARGEST_SEED = 2**32 - 1
"""Largest seed that torch, NumPy and Lightning all take."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` to ``most``, above ``above`` and below ``below``.

    Attributes:
        or_zero: whether 0 may stand for something else, though it is outside.
    """

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf
    or_zero: bool = False

    def refusal(self, value: Any) -> str | None:
        """Return what is wrong with a number, or None."""
        if not isinstance(value, int | float):
            return f"is {value!r}; it must be {self}"
        if isinstance(value, int) and abs(value) > LARGEST:
            return f"is a number beyond ±{LARGEST:.0e}, more than 64 bits hold; write a smaller one"
        if not isfinite(value):
            return f"is {value}; it must be {self}"
        if self.least <= value <= self.most and self.above < value < self.below:
            return None
        if self.or_zero and value == 0:
            return None
        return f"is {_digits(value)}; it must be {self}"

    def __str__(self) -> str:
        words = {
            "at least": self.least,
            "more than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        bounds = [f"{word} {_digits(bound)}" for word, bound in words.items() if abs(bound) < inf]
        return ("0, or " if self.or_zero else "") + (" and ".join(bounds) or "a finite number")


def _digits(number: float) -> str:
    """Return a number as a user writes it: whole ones with all their digits."""
    return str(int(number)) if abs(number) < 1e16 and number == int(number) else f"{number:g}"


TEMPERATURES = Range(least=1e-6, most=1000, or_zero=True)
"""Temperatures: 0 is greedy, and logits divided by less than the least could leave float32."""

MASSES = Range(least=1e-30, most=1)
"""Masses of probability that float32 tells from 0."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of some words."""

    words: tuple[str, ...]

    def refusal(self, value: Any) -> str | None:
        """Return what is wrong with a word, or None."""
        if value in self.words:
            return None
        return f"is {value!r}{did_you_mean(str(value), self.words, all_of_them=True)}"


@dataclasses.dataclass(frozen=True)
class Form:
    """Texts that a regular expression matches as a whole."""

    pattern: str
    advice: str

    def refusal(self, value: Any) -> str | None:
        """Return what is wrong with a text, or None."""
        matches = isinstance(value, str) and re.fullmatch(self.pattern, value, re.DOTALL)
        return None if matches else f"is {value!r}; {self.advice}"


LONGEST_NAME = 100
"""Characters of a name, so that what is put around it fits a file system's 255 bytes."""


@dataclasses.dataclass(frozen=True)
class Name:
    """Names that files are called by: no path, nothing hidden, and short enough everywhere.

    Attributes:
        reserved: a regular expression of names that mean something else.
    """

    reserved: str = ""

    def refusal(self, value: Any) -> str | None:
        """Return what is wrong with a name, or None."""
        if not isinstance(value, str):
            return f"is {value!r}, which is no text; quote it"
        if re.fullmatch(self.reserved, value, re.IGNORECASE) and value:
            return f"the name {value!r} has a meaning of its own here; choose another"
        if not value.strip() or value != value.strip():
            return f"is {value!r}; files are called by it: begin and end it with a character"
        if len(value) > LONGEST_NAME or len(value.encode(errors="replace")) > 2 * LONGEST_NAME:
            short = f"{value[:20]}…"
            return (
                f"is {short!r} of {len(value)} characters; files are called by it, and have "
                f"{LONGEST_NAME} at most"
            )
        if value.startswith(".") or set(value) & {"/", "\\"} or not value.isprintable():
            return (
                f"is {value!r}; files are called by it: no '/', '\\' or control character, and no "
                "'.' at its beginning"
            )
        return None


LIMIT, KEYS, DISTINCT = "limit", "keys", "distinct"
"""Keys of a field's metadata: the limit of its values or items, that of a mapping's keys, and
whether the items of a list differ from each other."""


Limit = Range | Choice | Form | Name


def limited(default: Any, limit: Limit) -> Any:
    """Return a dataclass field whose value, or every item of it, keeps to a limit; null may too."""
    metadata = {LIMIT: limit}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def ranged(
    default: Any = dataclasses.MISSING,
    *,
    least: float = -inf,
    most: float = inf,
    above: float = -inf,
    below: float = inf,
) -> Any:
    """Return a dataclass field of a number, or of a list of numbers, within a ``Range``."""
    return limited(default, Range(least, most, above, below))


def any_seed(default: Any = 0) -> Any:
    """Return a dataclass field of a seed, or of a list of seeds."""
    return ranged(default, least=0, most=LARGEST_SEED)


def filled(default: Any, advice: str) -> Any:
    """Return a dataclass field of a text, or of a list of texts, that are not empty."""
    return limited(default, Form(r".*\S.*", advice))


def each_once(items: Any) -> Any:
    """Return the field of a list again, as one whose items differ from each other."""
    metadata = {**items.metadata, DISTINCT: True}
    return dataclasses.field(default_factory=items.default_factory, metadata=metadata)


def named(limit: Name) -> Any:
    """Return a dataclass field of a mapping, empty by default, whose keys become names of files."""
    return dataclasses.field(default_factory=dict, metadata={KEYS: limit})


def choice(default: Any, words: Sequence[str]) -> Any:
    """Return a dataclass field of a word, or of a list of words, out of ``words``."""
    return limited(default, Choice(tuple(words)))


# --- reading and writing ------------------------------------------------------------------------


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a YAML file as a plain tree (interpolations still in it), and each full key's line."""
    with about(path, "read"):
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "no such file"
            raise ConfigError("", f"{found}; name an experiment's YAML", str(path))
    try:
        text = read_bounded(path, LARGEST_YAML).decode()
        root = yaml.compose(text)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError("", "must be a mapping of keys to values", str(path))
        _check_extent(root, {}, 0)
        tree = OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
    except RecursionError:
        raise ConfigError(
            "", "is nested without end, or too deeply to be read", str(path)
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError("", f"broken YAML: {error.problem}", f"{path}:{line}") from None
    except OmegaConfBaseException as error:
        raise _config_error(error, "").at(str(path)) from None
    except UnicodeDecodeError as error:
        problem = f"cannot be read: byte {error.start + 1} is no UTF-8; save it as UTF-8"
        raise ConfigError("", problem, str(path)) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("", f"cannot be read: {error}", str(path)) from None
    return cast(dict[str, Any], tree), dict(_lines(root, ""))


LARGEST_YAML = 2**20
"""Bytes of a YAML that is read."""
DEEPEST, MOST = 100, 1_000_000
"""Levels of a YAML, and values that it may stand for; aliases multiply them."""


def _check_extent(node: yaml.Node | None, known: dict[int, int], depth: int) -> int:
    """Return how many values a node stands for, its aliases written out.

    Raises:
        RecursionError: they are nested too deeply, an alias is part of itself, or too many.
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if depth > DEEPEST:
        raise RecursionError
    if id(node) not in known:
        parts = (
            chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        )
        known[id(node)] = 1 + sum(_check_extent(part, known, depth + 1) for part in parts)
    if known[id(node)] > MOST:
        raise RecursionError
    return known[id(node)]


def parse_value(text: str) -> Any:
    """Return the value of an override: YAML as OmegaConf reads it (``1e-4`` is a number).

    Raises:
        ValueError: the text is no YAML.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except yaml.MarkedYAMLError as error:
        raise ValueError(error.problem) from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(first_line(error)) from None
    return cast(dict[str, Any], tree)["value"]


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return a plain tree as YAML that loads to the same tree."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(dict(tree))))


def literal(tree: Any) -> Any:
    """Return the tree with ``${`` escaped, so that OmegaConf reads the text as it stands."""
    if isinstance(tree, Mapping):
        return {key: literal(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [literal(value) for value in tree]
    # A backslash before it would escape the one that is put there, so that is doubled.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", tree) if isinstance(tree, str) else tree


def refuse_resolvers(tree: Any, key: str) -> None:
    """Refuse what would read more than the tree itself, as ``${oc.env:HOME}`` does.

    Raises:
        ConfigError: with the key.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            refuse_resolvers(value, join(key, name))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            refuse_resolvers(value, f"{key}[{i}]")
    elif isinstance(tree, str) and re.search(r"(?<!\\)(\\\\)*\$\{[^}]*:", tree):
        raise ConfigError(key, f"is {tree!r}, which asks this machine for a value; write the value")


# --- checking -----------------------------------------------------------------------------------


def resolve(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Return the typed object: defaults filled in, interpolations resolved, values checked.

    Raises:
        ConfigError: an unknown key, a wrong type, a missing value, one beyond its field's limit, or
            what a ``__post_init__`` refuses.
    """
    return _built(cls, shape(tree, cls, ""), "")


def options(cls: type[T], values: Mapping[str, Any], key: str) -> T:
    """Return an instance of a component's option dataclass, whose YAML node stands at ``key``.

    Raises:
        ConfigError: as ``resolve``; also when the dataclass itself cannot be used.
    """
    refuse_unusable(cls, key)
    return _built(cls, literal(shape(values, cls, key)), key)


def refuse_unusable(cls: type[Any], key: str = "") -> None:
    """Refuse an option dataclass that no values could be checked against.

    Raises:
        ConfigError: at ``key``, with what its annotations or defaults provoke.
    """
    try:
        _defaults(cast(Any, cls))
    except Exception as error:  # whatever a plug-in's annotations may provoke
        theirs = "" if isinstance(error, OmegaConfBaseException) else f"{type(error).__name__}: "
        problem = f"the options {cls.__qualname__} cannot be used: {theirs}{first_line(error)}"
        raise ConfigError(key, problem) from error


@cache
def _defaults(cls: type[Any]) -> DictConfig:
    """Return a dataclass as OmegaConf reads it, which takes longer than all that is done with it.

    What is returned is shared; merging copies it.
    """
    return cast(DictConfig, OmegaConf.structured(cls))


def shape(value: Any, hint: Any, key: str) -> Any:
    """Check a plain value's keys against a type, and turn 4.0 into 4 where an int is expected.

    Scalars are left to OmegaConf; keys are checked here, because only here is it known which keys
    there could have been.
    """
    if value == "???":
        raise ConfigError(key, f"has no value yet; give one, as in {key}=…")
    if dataclasses.is_dataclass(hint):
        return _shape_fields(value, hint, key)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return value if value is None or len(inner) > 1 else shape(value, inner[0], key)
    if origin in (dict, list):
        return _shape_items(value, origin, arguments, key)
    return _shape_scalar(value, hint, key)


def _shape_scalar(value: Any, hint: Any, key: str) -> Any:
    if hint is str and isinstance(value, Mapping | list):  # of which OmegaConf takes one in a list
        found = "list" if isinstance(value, list) else "mapping"
        raise ConfigError(key, f"must be a text and no {found}")
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # sweeps write 4.0, people 1e3
    if hint is bool and type(value) in (int, float) and value not in (0, 1):
        raise ConfigError(key, f"is {value!r}; write true or false")
    if type(value) is int and (problem := Range().refusal(value)):
        raise ConfigError(key, problem)  # here, because no float may hold it
    return value


def _shape_items(value: Any, origin: type, arguments: tuple[Any, ...], key: str) -> Any:
    whole = isinstance(value, str) and "${" in value  # the whole of another section
    if whole and (origin is list or arguments[1] is Any):
        return value
    if value is None:
        raise ConfigError(key, "is empty; give it a value or take the line out")
    if origin is list:
        if not isinstance(value, list):
            example = f", as in [{value}]" if len(str(value)) < 80 else ""
            raise ConfigError(key, f"must be a list{example}")
        return [shape(item, arguments[0], f"{key}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        example = f", as in {{name: {value}}}" if arguments[1] is Any else ""
        raise ConfigError(key, f"must be a mapping of keys to values{example}, not {value!r:.80}")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(join(key, name), f"the key {name!r} is no text; quote it")
    return {name: shape(item, arguments[1], join(key, name)) for name, item in value.items()}


def _shape_fields(value: Any, cls: Any, key: str) -> dict[str, Any]:
    if value is None:
        raise ConfigError(key, "is empty; give it a value or take the line out")
    if not isinstance(value, Mapping):
        raise ConfigError(key, f"must be a mapping of keys to values, not {value!r:.80}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in value:
        if name not in fields:
            suggestion = did_you_mean(str(name), fields)
            raise ConfigError(join(key, name), f"unknown key{suggestion}")
    for name, field in fields.items():
        if name not in value and _mandatory(field):
            raise ConfigError(join(key, name), "is missing")
    hints = typing.get_type_hints(cls)
    return {name: shape(item, hints[name], join(key, name)) for name, item in value.items()}


def _mandatory(field: dataclasses.Field[Any]) -> bool:
    # "???" is OmegaConf's own way of saying that there is no default.
    no_default = field.default is dataclasses.MISSING or field.default == "???"
    return no_default and field.default_factory is dataclasses.MISSING


def _built(cls: type[T], shaped: Mapping[str, Any], key: str) -> T:
    """Return the instance, with OmegaConf's defaults, types and interpolations."""
    try:
        merged = OmegaConf.merge(_defaults(cast(Any, cls)), shaped)
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _config_error(error, key) from None
    return cast(T, _instance(plain, cls, key))


def _instance(value: Any, hint: Any, key: str, field: dataclasses.Field[Any] | None = None) -> Any:
    """Return a value of the right type with dataclasses in place of mappings, limits checked."""
    arguments = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    if isinstance(value, list):
        _check_distinct(value, key, field)
        inner = arguments[0] if typing.get_origin(hint) is list else Any
        return [_instance(item, inner, f"{key}[{i}]", field) for i, item in enumerate(value)]
    if isinstance(value, dict):
        _check_keys(value, key, field)
        cls = next((each for each in (hint, *arguments) if dataclasses.is_dataclass(each)), None)
        if cls is not None and typing.get_origin(hint) is not dict:
            return _dataclass(cls, value, key)
        inner = Any if cls is None else cls
        return {name: _instance(item, inner, join(key, name)) for name, item in value.items()}
    if value is not None and (problem := _refusal(value, field)):
        raise ConfigError(key, problem)
    return value


def _check_keys(value: Mapping[Any, Any], key: str, field: dataclasses.Field[Any] | None) -> None:
    """Refuse keys of a mapping that its field does."""
    if field is None or KEYS not in field.metadata:
        return
    for name in value:
        if problem := field.metadata[KEYS].refusal(name):
            raise ConfigError(join(key, name), problem)


def _check_distinct(values: Sequence[Any], key: str, field: dataclasses.Field[Any] | None) -> None:
    """Refuse an item that is in the list already, where the field's may not be."""
    if field is None or not field.metadata.get(DISTINCT):
        return
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ConfigError(key, f"has {value!r} twice; leave one out")


def _refusal(value: Any, field: dataclasses.Field[Any] | None) -> str | None:
    """Return what is wrong with a scalar, or None.

    Numbers are finite, unless the field's own default is not.
    """
    if isinstance(value, str):
        try:
            check_text(value, "the text")
        except FalconLabError as error:
            return str(error)
    if field is None:
        return None
    if LIMIT in field.metadata:
        return cast("str | None", field.metadata[LIMIT].refusal(value))
    if type(value) in (int, float) and value != field.default:
        return Range().refusal(value)
    return None


def _dataclass(cls: Any, values: Mapping[str, Any], key: str) -> Any:
    hints = typing.get_type_hints(cls)
    made = {
        field.name: _instance(values[field.name], hints[field.name], join(key, field.name), field)
        for field in dataclasses.fields(cls)
        if field.init
    }
    try:
        return cls(**made)
    except ConfigError as error:
        raise error.below(key) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(key, str(error)) from error


# --- places and messages ------------------------------------------------------------------------


def _lines(node: yaml.Node | None, key: str) -> list[tuple[str, int]]:
    """Return full key -> line, for every key below a YAML node."""
    if not isinstance(node, yaml.MappingNode):
        return []
    found = []
    for name, value in node.value:
        full = join(key, name.value)
        found += [(full, name.start_mark.line + 1), *_lines(value, full)]
    return found


def _config_error(error: OmegaConfBaseException, key: str) -> ConfigError:
    below = getattr(error, "full_key", None) or ""
    return ConfigError(join(key, below) if below else key, _in_our_words(first_line(error)))


def _in_our_words(message: str) -> str:
    """Return a message of OmegaConf as one about a YAML."""
    for theirs, ours in (
        (r"(.*)could not be converted to Integer(.*)", r"\1is not a whole number\2"),
        (r"(.*)could not be converted to Float(.*)", r"\1is not a number\2"),
        (r"Value '(.*)' is not a valid bool.*", r"is '\1'; write true or false"),
        (r".*(not Optional|value 'None'|NoneType).*", "cannot be null; give it a value"),
        (r"Cannot convert 'ListConfig' to string.*", "must be a text and no list"),
        (r"Cannot convert 'DictConfig' to string.*", "must be a text and no mapping"),
        (r"Value '(.*)' is not a supported primitive type.*", r"is a \1 to YAML; quote it"),
    ):
        if found := re.fullmatch(theirs, message):
            return found.expand(ours)
    return message
