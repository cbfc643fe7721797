"""A rake: the root's best tokens, and the most likely path from each.

Shapes: W paths, F frontier blocks, k block, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext, TreeBuilder
from falcon_lab.tree import TokenTree, ancestor_matrix
from falcon_lab_sample import RakeConfig


class Rake(TreeBuilder):
    """``width`` paths of ``depth`` tokens, stored level by level."""

    def __init__(self, config: RakeConfig, context: BuildContext) -> None:
        self._width = min(config.width, context.host.vocab_size)
        self._block = context.block
        self.max_depth = context.reach(config.depth)
        self.max_nodes = 1 + self._width * self.max_depth
        self._paths: list[Tensor] = []  # a level's tokens, each [W]
        self._scores: list[Tensor] = []

    def start(self, context: RoundContext) -> Frontier | None:
        """The root, unless nothing may be drafted."""
        self._root, budget = context.root, context.budget
        self._paths, self._scores = [], []
        limits = [self.max_depth]
        if budget.depth is not None:
            limits.append(budget.depth)
        if budget.passes is not None:
            limits.append(budget.passes * self._block)
        self._paths_now = self._width
        if budget.nodes is not None:
            self._paths_now = max(1, min(self._width, budget.nodes))
            limits.append(budget.nodes // self._paths_now)
        self._depth = min(limits)
        return Frontier.root(context.root.device) if self._depth > 0 else None

    def grow(self, output: DraftOutput) -> Frontier | None:
        """One level for each row, as long as every path is proposed a token."""
        first = not self._paths
        log_q = output.logits.float().log_softmax(-1)  # [F, rows, V]
        for row in range(min(output.logits.shape[1], self._depth - len(self._paths))):
            if not self._paths:
                scores, tokens = log_q[0, 0].topk(self._paths_now)
            else:
                scores, tokens = log_q[:, row].max(-1)
                scores = scores.expand(self._paths_now)
                tokens = tokens.expand(self._paths_now)
            if not bool(scores.isfinite().all()):
                return None
            self._paths.append(tokens)
            self._scores.append(scores)
        if len(self._paths) >= self._depth or len(self._paths) % self._block:
            return None
        parents = torch.arange(self._paths_now, device=self._root.device)
        newest = torch.stack(self._paths[-self._block :], dim=1)  # [W, k]
        return Frontier(newest, torch.zeros_like(parents) if first else parents)

    def finish(self) -> TokenTree:
        """Root first, then level by level."""
        levels, width, device = len(self._paths), self._paths_now, self._root.device
        tokens = torch.cat((self._root.view(1), *self._paths))
        node = torch.arange(1, 1 + levels * width, device=device)
        above = (node - width).where(node > width, torch.zeros_like(node))
        parents = torch.cat((node.new_tensor([-1]), above))
        depth = torch.cat((node.new_zeros(1), (node - 1) // width + 1))
        log_q = torch.cat((torch.zeros(1, device=device), *self._scores))
        ancestors = ancestor_matrix(parents)
        return TokenTree(tokens, parents, depth, ancestors, "deterministic", log_q)
