"""How a trained drafter is written as another program reads it, and read back.

A format of one kind of drafter derives from ``ExportFormat``, and is registered with the drafter:
``register.drafter(…, exports={"vllm": "my_package.exports:Vllm"})``. It maps names and
configurations; folders, cards and comparisons are not its business. Drafters that somebody else
has trained are read by an ``ImportFormat``: ``imports="my_package.imports:Published"``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from falcon_lab.errors import FalconLabError


@dataclass(frozen=True)
class TrainedDrafter:
    """A saved drafter, as a format reads it.

    Attributes:
        config: its component's options.
        drafter: itself, built for the target; its own weights need not be loaded.
        tensors: its weights by name, as they were saved.
        host: the target.
        place: where other programs find the target: a hub id or a folder.
        draft_tokens: how many tokens of a chain are to be drafted a round.
    """

    config: Any
    drafter: Any
    tensors: Mapping[str, Tensor]
    host: Any
    place: str
    draft_tokens: int


@dataclass(frozen=True)
class Exported:
    """What a folder of a format holds.

    Attributes:
        config: the content of ``config.json``.
        tensors: that of ``model.safetensors``.
        others: further files, by name.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    others: dict[str, bytes] = field(default_factory=dict)


class ExportFormat(ABC):
    """A format of one kind of drafter.

    Attributes:
        engines: which programs read it, with the versions that it was written for.
        tags: that their users search the hub for.
    """

    engines: str
    tags: tuple[str, ...] = ()

    @abstractmethod
    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map a drafter.

        Raises:
            FalconLabError: the format has no words for something of it.
        """

    @abstractmethod
    def read(self, exported: Exported, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Return the drafter's weights by their own names.

        Args:
            exported: what a folder holds; each of its tensors must be accounted for.
            drafter: without its ``tensors``.

        Raises:
            FalconLabError: a tensor is missing or unknown.
        """

    @abstractmethod
    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return how the folder is served, as the Markdown of a card."""


@dataclass
class StrangersFolder:
    """What a folder holds that another program wrote.

    Attributes:
        path: of the folder.
        config: the content of ``config.json``, with that of ``transformer_layer_config`` beside it.
        tensors: the weights by name; what is taken is gone, and what is left in the end is refused.
        taps: layers of the target, as the user gave them; None: the folder must say them.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    taps: list[int] | None = None

    def take(self, name: str) -> Tensor:
        """Return a tensor, which is read by that.

        Raises:
            FalconLabError: there is none of that name.
        """
        if name not in self.tensors:
            raise FalconLabError(f"among its tensors {name} is missing; copy it again")
        return self.tensors.pop(name)

    def expect(self, key: str, *allowed: Any, what: str) -> None:
        """See that a key of ``config.json`` asks for nothing that a drafter of ours lacks.

        Args:
            key: may be missing, or null.
            allowed: its other values.
            what: the drafter, for the message.

        Raises:
            FalconLabError: it has another value.
        """
        found = self.config.get(key)
        if found is not None and found not in allowed:
            known = " or ".join(map(repr, allowed)) or "nothing"
            raise FalconLabError(
                f"its config.json has {key}: {found!r}, and {what} of ours knows {known} there"
            )

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number of ``config.json``.

        Raises:
            FalconLabError: it is none, or missing and without a default.
        """
        found = self.config.get(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise FalconLabError(f"its config.json has {key}: {found!r} in place of a number")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1 of ``config.json``.

        Raises:
            FalconLabError: it is none, or missing and without a default.
        """
        found = self.number(key, default)
        if type(found) is not int or found < 1:
            raise FalconLabError(f"its config.json has {key}: {found!r}; it must be 1 or more")
        return found

    def section(self, key: str) -> dict[str, Any] | None:
        """Return a section of ``config.json``; None where it is not there.

        Raises:
            FalconLabError: it is something else.
        """
        found = self.config.get(key)
        if found is not None and not isinstance(found, dict):
            raise FalconLabError(f"its config.json has {key}: {found!r} in place of a section")
        return found

    def numbers(self, key: str, content: Any) -> list[int]:
        """Return a list of layers' numbers that stands in ``config.json`` as ``key``.

        Raises:
            FalconLabError: it is none.
        """
        if not isinstance(content, list) or not all(type(each) is int for each in content):
            raise FalconLabError(f"its config.json has {key}: {content!r} in place of layers")
        return content


class ImportFormat(ABC):
    """How one kind of drafter is recognised and read where others have trained it.

    Attributes:
        programs: whose folders it reads.
    """

    programs: str

    @abstractmethod
    def recognises(self, folder: StrangersFolder) -> bool:
        """Return whether a folder holds such a drafter, by names and kinds alone."""

    @abstractmethod
    def options(self, folder: StrangersFolder, host: Any) -> dict[str, Any]:
        """Return the options of the component that computes the same.

        Raises:
            FalconLabError: none does, with the one reason.
        """

    @abstractmethod
    def read(self, folder: StrangersFolder, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Return the drafter's weights by their own names, and leave behind what is unknown.

        Args:
            folder: whose tensors are taken.
            drafter: built by ``options``, without its ``tensors``.

        Raises:
            FalconLabError: a tensor is missing, or is not what it must be.
        """
