"""A server that writes hidden states as vLLM does with our connector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from falcon_lab.data.state_files import asked_for, write_states
from falcon_lab.model.target import Target


class StatesServer:
    """Reads texts with a target; the last layer's states are before the final norm.

    Args:
        target: what it runs.
        given: layers whose states it gives under the names of those that are wanted.
    """

    def __init__(self, target: Target, given: Sequence[int] | None = None) -> None:
        self.target, self.given = target, given

    def write(self, folder: Path, at_most: int | None = None) -> None:
        """Write what is asked for."""
        wanted, texts = asked_for(folder)
        layers = wanted.layers if self.given is None else self.given
        for text in texts[:at_most]:
            states = self._states(text)
            write_states(
                folder, text, torch.stack([states[i] for i in layers], dim=1), wanted.layers
            )

    @torch.no_grad()
    def _states(self, text: list[int]) -> list[Tensor]:
        """Return ``[T, H]`` of every layer."""
        model = self.target.model
        before_norm: list[Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(
            lambda _, given: before_norm.append(given[0][0])
        )
        found = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hook.remove()
        return [*(each[0] for each in found[:-1]), *before_norm]
