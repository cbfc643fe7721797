"""Chimera's draft model (arXiv 2402.15758): trigrams, the target's features, and residual heads.

h_t is what the target's LM head reads to draw x_{t+1}, the root of the next tree. The trigram
encoder makes a row of a token and the two before it; the full-context encoder, one decoder layer,
sends that of the newest token of a path through attention to the target's features h_0 … h_t and to
the rows of the tokens between. Its output stands for the feature that the target does not have yet;
head i reads it beside h_t, for the i-th token below the root, counted from 0.

Shapes: B batch, T tokens, F frontier blocks, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.interfaces import BuildContext, DrafterInputs, Frontier, Observation
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.masks import packed_mask
from falcon_lab.model.passes import EagerPass
from falcon_lab_hydra import ChimeraConfig
from falcon_lab_hydra.path_heads import PathDrafter

GRAM = 3


class TrigramEncoder(nn.Module):
    """x + SiLU(W·x + b) of three embeddings side by side, and a map to the width of one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(GRAM * hidden, GRAM * hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.out = nn.Linear(GRAM * hidden, hidden, bias=False)

    def forward(self, trigrams: Tensor) -> Tensor:
        """Map ``[..., 3, H]`` to ``[..., H]``."""
        rows = trigrams.flatten(-2)
        encoded: Tensor = self.out(rows + functional.silu(self.linear(rows)))
        return encoded


class ResidualHead(nn.Module):
    """A map of 2H to V, as the mean of one for each half: both begin as the target's LM head.

    Args:
        words: the target, or its draft vocabulary.
    """

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.known, self.guessed = words.copy_head(), words.copy_head()

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``[..., 2H]`` to ``[..., V]``."""
        known, guessed = rows.chunk(2, dim=-1)
        logits: Tensor = (self.known(known) + self.guessed(guessed)) / 2
        return logits


class ChimeraDrafter(PathDrafter):
    """The draft model of ``ChimeraConfig``.

    Attributes:
        behind: one, the root's row.
    """

    behind = 1

    def __init__(self, config: ChimeraConfig, context: BuildContext) -> None:
        host = context.host
        words = context.draft_vocabulary(config.draft_vocabulary, own_head=True)
        super().__init__(host, config.heads, Backbone.short(host.config, 1), words)
        self.trigram = TrigramEncoder(host.hidden_size)
        self.heads = nn.ModuleList(ResidualHead(words or host) for _ in range(config.heads))
        self._recent: Tensor | None = None  # up to 3 of the newest committed tokens
        self._paths: Tensor | None = None  # [F, 3] long, the newest tokens of each path
        self.draft_through(EagerPass)

    def width(self, number: int) -> int:
        """Return 2H: the target's newest feature, and what stands for the one of the path's end."""
        size: int = self.host.hidden_size
        return 2 * size

    def hidden(self, number: int, rows: Tensor) -> Tensor:
        """Return the rows as they are: the heads are linear."""
        return rows

    def logits(self, number: int, hidden: Tensor) -> Tensor:
        """Turn ``[..., 2H]`` into ``[..., V]``."""
        found: Tensor = self.heads[number](hidden)
        return found

    def features(self, hidden: Tensor) -> Tensor | None:
        """Return what the full-context encoder puts out, which learns the target's features."""
        return hidden[..., self.host.hidden_size :]

    # --- training -----------------------------------------------------------------------------

    def training_rows(self, inputs: DrafterInputs, passes: int) -> list[Tensor]:
        """Send the features and the trigrams of all passes through the encoder at once."""
        assert self.context is not None
        features = inputs.features.to(self.weight.dtype)
        trigrams = [self.trigram(self._trigrams(inputs, ahead)) for ahead in range(passes)]
        positions = [inputs.positions + ahead for ahead in range(passes + 1)]
        encoded = self.context(
            embeddings=torch.cat([features, *trigrams], dim=1),
            positions=torch.cat(positions, dim=1).clamp_max(self.host.max_positions - 1),
            mask=_mask(inputs.documents, passes),
        )
        _, *outputs = encoded.chunk(passes + 1, dim=1)
        return [torch.cat([features, output], dim=-1) for output in outputs]

    def _trigrams(self, inputs: DrafterInputs, ahead: int) -> Tensor:
        """Return ``[B, T, 3, H]``: the token ``ahead`` of each row's and the two before it.

        Before a document's first token it stands itself.
        """
        last = inputs.tokens.shape[1] - 1
        column = torch.arange(last + 1, device=inputs.tokens.device)
        first = column - inputs.positions
        back = torch.arange(GRAM - 1, -1, -1, device=column.device)
        chosen = ((column + ahead)[None, :, None] - back).maximum(first[..., None]).clamp_max(last)
        tokens = inputs.tokens.gather(1, chosen.flatten(1)).view(chosen.shape)
        return self.embed(tokens)

    # --- drafting -----------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a text. (Its first token alone makes no input.)"""
        super().reset(first)
        self._recent, self._paths = None, None

    def observe(self, observation: Observation) -> None:
        """Take new positions in, and remember the newest tokens."""
        super().observe(observation)
        known = observation.tokens[:0] if self._recent is None else self._recent
        self._recent = torch.cat([known, observation.tokens])[-GRAM:]

    def root_rows(self, root: Tensor) -> Tensor:
        """Return the newest feature, and what the encoder makes of the root's trigram."""
        assert self._recent is not None
        assert self.read is not None
        assert self.newest is not None
        missing = GRAM - self._recent.shape[0]
        self._paths = torch.cat([self._recent[:1].expand(missing), self._recent])[None]
        return torch.cat([self.newest, self.read.begin(self._encoded(self._paths))], dim=-1)

    def node_rows(self, rows: Tensor, frontier: Frontier) -> Tensor:
        """Return the same of F nodes, each by the tokens of its own path."""
        assert self.read is not None
        assert self.newest is not None
        assert self._paths is not None
        older = self._paths[frontier.parents, 1:]
        self._paths = torch.cat([older, frontier.tokens], dim=1)
        encoded = self.read.expand(self._encoded(self._paths), frontier)
        return torch.cat([self.newest.expand(encoded.shape), encoded], dim=-1)

    def _encoded(self, tokens: Tensor) -> Tensor:
        encoded: Tensor = self.trigram(self.embed(tokens))
        return encoded


def _mask(documents: Tensor, passes: int) -> Tensor:
    """Return ``[B, (1 + n)·T, (1 + n)·T]``: the features, then the rows of n passes.

    Row t of a pass attends to the features up to t of its document, and to row t of the passes
    before and of its own; features attend to features.
    """
    features = packed_mask(documents)  # [B, T, T]
    own = torch.eye(documents.shape[1], dtype=torch.bool, device=documents.device)
    own = own.expand_as(features)
    nothing = torch.zeros_like(features)
    rows = [torch.cat([features, *[nothing] * passes], dim=2)]
    for number in range(1, passes + 1):
        rows.append(torch.cat([features, *[own] * number, *[nothing] * (passes - number)], dim=2))
    return torch.cat(rows, dim=1)
