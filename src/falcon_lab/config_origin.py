"""Who said what: the file's line, or the override, that an error of a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from falcon_lab.config_errors import ConfigError
from falcon_lab.config_overrides import Override


@dataclass
class Origin:
    """Where a configuration's keys come from.

    Attributes:
        name: what stands for the whole.
        overrides: in the order in which they were applied.
        places: full key -> ``file:line``.
    """

    name: str
    overrides: list[Override]
    places: dict[str, str] = field(default_factory=dict)

    def add(self, path: Path, lines: Mapping[str, int]) -> None:
        """The keys of a file; one that an earlier file said too is the later one's."""
        self.places |= {key: f"{path}:{line}" for key, line in lines.items()}

    def blame(self, error: ConfigError) -> str:
        """The override that set the key, or something around or in it, else the file and line."""
        key = error.key
        for override in reversed(self.overrides):
            inside = override.key.startswith(f"{key}.")
            # An error of a whole component names the option that it is about in its text.
            spoken_of = override.key.rpartition(".")[2] in error.problem
            if override.covers(key) or (inside and (key not in self.places or spoken_of)):
                return override.label
        while key and key not in self.places:
            key = key.rpartition("[" if key.endswith("]") else ".")[0]
        return self.places[key] if key else self.name
