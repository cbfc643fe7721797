"""EasySpec: attentions side by side while drafting. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.errors import ConfigError
from falcon_lab.fields import choice, filled, ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["EasySpecConfig", "register_components"]

CALIBRATIONS = ("never", "prefill", "every_round", "every_mismatch")
"""When committed tokens go through a draft model's layers one after the other."""

SIZE = 4
"""The paper's N, layers of a group."""


@dataclass
class EasySpecConfig:
    """Configure which layers' attentions run side by side, and in which model."""

    size: int | None = ranged(None, least=1, most=9999)
    """N: layers of a group, with the model's first and last layers alone; null is 4."""
    groups: list[list[int]] | None = ranged(None, least=0, most=9999)
    """The groups themselves, in place of N: lists of consecutive layers, counted from 0."""
    model: str | None = filled(None, "name a model, or write null for the target itself")
    """A draft model, a hub id or a folder with the target's own vocabulary; null is the target."""
    revision: str | None = filled(None, "name a commit, tag or branch, or write null")
    """Commit, tag or branch on the hub."""
    calibration: str | None = choice(None, CALIBRATIONS)
    """When a draft model reads committed tokens layer by layer; null is every_round. (The target's
    own verification does so in every round.)"""

    def __post_init__(self) -> None:
        if self.groups is not None and self.size is not None:
            raise ConfigError("size", "excludes groups; leave one of them out")
        for key in ("revision", "calibration"):
            if getattr(self, key) is not None and self.model is None:
                raise ConfigError(key, "is that of a draft model; name the model")


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter."""
    register.drafter("easyspec", "falcon_lab_easyspec.drafter:build", config=EasySpecConfig)
