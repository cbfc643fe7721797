"""Hydra's heads (arXiv 2402.05109): each reads the tokens that were drafted before its own.

h_t is what the target's LM head reads to draw x_{t+1}, the root of the next tree. Head i, from 0
on, reads h_t beside the embeddings of the root and of i tokens below it, and says what comes next.

Shapes: B batch, T tokens, C channels that a head reads, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.interfaces import BuildContext, DrafterInputs, Frontier
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.masks import packed_mask
from falcon_lab.model.passes import EagerPass
from falcon_lab_hydra import HydraConfig
from falcon_lab_hydra.path_heads import PathDrafter


class Layer(nn.Module):
    """R·x + SiLU(W·x + b), with W and b of zero at the start.

    R takes the first H of C channels at the start, and is trained; where C is H it is the identity.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.residual: nn.Linear | None = None
        if channels != hidden:
            self.residual = nn.Linear(channels, hidden, bias=False)
            nn.init.eye_(self.residual.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``[..., C]`` to ``[..., H]``."""
        kept = rows if self.residual is None else self.residual(rows)
        return kept + functional.silu(self.linear(rows))


class HydraDrafter(PathDrafter):
    """The heads of ``HydraConfig``, each an MLP of its own and, with ``head: own``, an LM head."""

    def __init__(self, config: HydraConfig, context: BuildContext) -> None:
        host = context.host
        own = config.head == "own"
        words = context.draft_vocabulary(config.draft_vocabulary, own_head=own)
        prefix = Backbone.short(host.config, 1) if config.prefix else None
        super().__init__(host, config.heads, prefix, words)
        size = host.hidden_size
        self.trunks = nn.ModuleList(
            nn.Sequential(
                Layer(self.width(number), size),
                *(Layer(size, size) for _ in range(config.layers - 1)),
            )
            for number in range(config.heads)
        )
        count = config.heads if own else 0
        self.heads = nn.ModuleList((words or host).copy_head() for _ in range(count))
        self.draft_through(EagerPass)

    def width(self, number: int) -> int:
        """Return H for the feature, and for every token of the path."""
        size: int = self.host.hidden_size
        return (number + 2) * size

    def hidden(self, number: int, rows: Tensor) -> Tensor:
        """Send ``[..., C]`` through a head's MLP: ``[..., H]``."""
        found: Tensor = self.trunks[number](rows)
        return found

    def logits(self, number: int, hidden: Tensor) -> Tensor:
        """Turn ``[..., H]`` into ``[..., V]``, by the head's own LM head if it has one."""
        if self.heads:
            own: Tensor = self.heads[number](hidden)
            return own
        words: Any = self.draft_vocabulary or self.host
        shared: Tensor = words.head(hidden.to(self.host.dtype))
        return shared

    def features(self, hidden: Tensor) -> Tensor | None:
        """Return them where the target's LM head reads what the heads put out."""
        return None if self.heads else hidden

    def training_rows(self, inputs: DrafterInputs, passes: int) -> list[Tensor]:
        """Return features beside the embeddings of 1, 2, … true tokens after them."""
        base = inputs.features.to(self.weight.dtype)
        if self.context is not None:
            mask = packed_mask(inputs.documents)
            base = self.context(embeddings=base, positions=inputs.positions, mask=mask)
        embedded = self.embed(inputs.tokens)
        column = torch.arange(embedded.shape[1], device=embedded.device)
        path, rows = [base], []
        for ahead in range(passes):
            path.append(embedded[:, (column + ahead).clamp_max(len(column) - 1)])
            rows.append(torch.cat(path, dim=-1))
        return rows

    def root_rows(self, root: Tensor) -> Tensor:
        """Return the newest feature, or what the prefix layer makes of it, beside the root."""
        base = self.newest if self.read is None else self.read.begin()
        assert base is not None
        return torch.cat([base, self.embed(root)], dim=-1)

    def node_rows(self, rows: Tensor, frontier: Frontier) -> Tensor:
        """Return the rows of the parents with one more token."""
        return torch.cat([rows[frontier.parents], self.embed(frontier.tokens[:, 0])], dim=-1)
