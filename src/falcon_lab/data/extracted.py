"""Hidden states that a server has written (``state_files.py``) in place of the target's passes.

Shapes: B sequences, T tokens of one, n tokens of a text, L layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from falcon_lab.data.state_files import Wanted, ask_for, file_of, read_states
from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from falcon_lab.data.packing import PackedSequences
    from falcon_lab.model.target import Target

CHECKED = 64
"""Tokens whose states are compared with the target's own."""
FAR = 0.1
"""Error of a state, in its own length, that rounding does not explain."""


class ExtractedStates:
    """A target whose features are read from files.

    Args:
        target: who would compute them; its norm and LM head are used.
        folder: of the files.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.fingerprint, self.hidden_size = target.fingerprint, target.hidden_size
        self.last = int(target.config.num_hidden_layers)
        self.taps: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Return the target's dtype."""
        return self.target.dtype

    @property
    def device(self) -> torch.device:
        """Return the target's device."""
        return self.target.device

    def head(self, features: Tensor) -> Tensor:
        """Compute logits ``[n, V]`` of ``[n, H]``."""
        return self.target.head(features)

    def tapped(self, layers: Sequence[int]) -> Self:
        """Return the same, whose ``tapped_teacher`` gives the states of some layers.

        Raises:
            FalconLabError: the target has no such layer.
        """
        other = copy.copy(self)
        other.taps = self.target.tapped(layers).taps
        return other

    def teacher(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Read features ``[B, T, H]`` of ``[B, T]`` long each; those of padding are 0.

        Raises:
            FalconLabError: there is no file of a text, or it is damaged, or of other layers.
        """
        return self.tapped_teacher(tokens, documents, positions)[0]

    @torch.no_grad()
    def tapped_teacher(
        self, tokens: Tensor, documents: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read features, and ``[B, T, L, H]`` of the layers; see ``teacher``."""
        layers = (self.last, *self.taps)
        shape = (*tokens.shape, len(layers), self.hidden_size)
        found = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for row, start, text in _texts(tokens.tolist(), documents.tolist()):
            states = read_states(self.folder, text, layers, self.hidden_size).to(found)
            states[:, 0] = self.target.norm(states[:, 0])
            found[row, start : start + len(text)] = states
        return found[:, :, 0], found[:, :, 1:]

    def prepare(self, sequences: Iterable[PackedSequences], layers: Iterable[int]) -> None:
        """See that the states of all texts are there, and are the target's.

        Args:
            sequences: in which the texts are packed.
            layers: whose states are wanted, beside the features.

        Raises:
            FalconLabError: some are not there, and it was written down which; or they are of
                another model, or of other layers than they say.
        """
        rows = ((each.tokens.tolist(), each.documents.tolist()) for each in sequences)
        texts = list({tuple(text): None for row in rows for _, _, text in _texts(*row)})
        missing = [text for text in texts if not file_of(self.folder, text).exists()]
        wanted = sorted({self.last, *layers})
        if missing:
            place = self.target.config.name_or_path or self.target.name
            ask_for(self.folder, Wanted(place, wanted), missing)
            raise FalconLabError(
                f"data.extracted_states: {len(missing):,} of {len(texts):,} texts have no states "
                f"in {self.folder}; have vLLM write them by python -m falcon_lab_serving extract "
                f"{self.folder}, and give the same command again"
            )
        if texts:
            self.check(max(texts, key=len), wanted)

    @torch.no_grad()
    def check(self, text: Sequence[int], layers: Sequence[int]) -> None:
        """Compare the states of a text's beginning with the target's own.

        Raises:
            FalconLabError: they are of another model, or of other layers than they say.
        """
        tokens = torch.tensor([text[:CHECKED]], device=self.device)
        place = torch.arange(tokens.shape[1], device=self.device)[None]
        own = self.target.tapped(range(self.last))
        features, states = own.tapped_teacher(tokens, torch.zeros_like(tokens), place)
        ours = states[0].transpose(0, 1)  # [layers, n, H]
        read = read_states(self.folder, text, layers, self.hidden_size)[: tokens.shape[1]]
        for layer, theirs in zip(layers, read.to(ours).unbind(1), strict=True):
            like, given = ours, theirs
            if layer == self.last:
                like = torch.cat([self.target.norm(ours), features])
                given = self.target.norm(theirs)
            errors = _errors(given, like)
            nearest = int(errors.argmin())
            if layer != nearest or errors[layer] > FAR:
                other = f"they are nearer to those of layer {nearest}" if layer != nearest else ""
                raise FalconLabError(
                    f"{file_of(self.folder, text)}: its states of layer {layer} are "
                    f"{float(errors[layer]):.1%} from the target's own"
                    f"{other and f', and {other}'}; the server runs another model or counts "
                    "layers otherwise: delete the folder, and have vLLM run "
                    f"{self.target.name} by falcon_lab_serving"
                )


def _errors(given: Tensor, like: Tensor) -> Tensor:
    """Return how far states ``[n, H]`` are from each of ``[L, n, H]``, as medians over tokens."""
    lengths = like.float().norm(dim=-1).clamp_min(1e-12)
    distances = (given.float() - like.float()).norm(dim=-1)
    return (distances / lengths).median(dim=-1).values


def _texts(
    tokens: Sequence[Sequence[int]], documents: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield row, first place and tokens of every document that is packed."""
    for row, (read, whose) in enumerate(zip(tokens, documents, strict=True)):
        start = 0
        for place in range(1, len(read) + 1):
            if place == len(read) or whose[place] != whose[start]:
                if whose[start] >= 0:
                    yield row, start, list(read[start:place])
                start = place
