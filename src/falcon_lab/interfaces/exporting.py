"""How a trained drafter is written as another program reads it, and read back.

A format of one kind of drafter derives from ``ExportFormat``, and is registered with the drafter:
``register.drafter(…, exports={"vllm": "my_package.exports:Vllm"})``. It maps names and
configurations; folders, cards and comparisons are not its business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
