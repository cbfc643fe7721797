"""Growing a tree where the drafter is surest, pass by pass.

Shapes: N nodes of the tree (the root counted), C candidates so far (the root counted), F blocks of
a pass, k block, m candidates per row, n most nodes of the tree, W width, V vocabulary.

A path's score is the sum of the drafter's log-probabilities along it, so a node never scores higher
than its parent. Hence the n best candidates are always prefix-closed; and what is not among the n
best of a level, or of all candidates so far, has nothing below it that could ever be. Both are left
out while the tree grows, and the result is the same.

Which row a node takes its candidates from is the rule of ``layout.py``: a block's k rows are one
grid, and the nodes of one depth below the block's node share a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.protocols import DraftOutput, Frontier, RoundContext
from falcon_lab.trees.template_tree import candidates
from falcon_lab.trees.token_tree import TokenTree, ancestor_matrix


class BestFirstTree:
    """A ``TreeBuilder`` that keeps the ``nodes`` likeliest candidates of all its passes.

    The drafter's own probabilities decide, at any temperature; they choose the drafts, never their
    acceptance, so the tree is always "deterministic". Equal scores go to the shallower node, then
    to the one below the better parent, then to the lower rank. What the drafter does not propose
    (``-inf``, or a row that is not there) has no place in the tree. A pass costs one look at the
    device from the host: how many blocks are worth another.

    Args:
        block: k of the drafter.
        nodes: n, the root not counted.
        depth: longest path.
        beam: most blocks of a pass; ``nodes`` is no limit.
        width: W, candidates of a row; ``nodes`` is no limit.
    """

    def __init__(self, block: int, *, nodes: int, depth: int, beam: int, width: int) -> None:
        self.block = block
        self.max_depth = depth
        self.max_nodes = nodes + 1
        self.beam = beam
        self.width = width

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._context = context
        budget, device = context.budget, context.root.device
        limits = [self.max_depth]
        if budget.depth is not None:
            limits.append(budget.depth)
        if budget.passes is not None:
            limits.append(budget.passes * self.block)
        self._depth = min(limits)
        most = self.max_nodes - 1
        self._nodes = most if budget.nodes is None else min(budget.nodes, most)
        self._reached = 0  # depth of the deepest candidates
        self._tokens = context.root.reshape(1)  # [C], like the next three
        self._parents = torch.full_like(self._tokens, -1)
        self._scores = torch.zeros(1, device=device)
        self._log_q = torch.zeros(1, device=device)
        self._stands = torch.zeros_like(self._tokens)  # [F] candidates where this pass's blocks are
        return Frontier.root(device) if self._depth > 0 and self._nodes > 0 else None

    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take the candidates of one pass in."""
        rows = min(output.logits.shape[1], self.block, self._depth - self._reached)
        if rows == 0:
            return None
        width = min(self.width, self._nodes)
        tokens, log_q, _ = candidates(
            output.logits[:, :rows], width, "deterministic", self._context
        )
        # Rounding must not put a child before its parent, nor a broken row before the root.
        log_q = log_q.clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        blocks = self._take(tokens, log_q)
        self._reached += rows
        if rows < self.block or self._reached == self._depth:
            return None
        return self._frontier(blocks)

    def finish(self) -> TokenTree:
        """The best of all candidates so far."""
        order = self._scores.sort(descending=True, stable=True).indices[: self._nodes + 1]
        kept = order[self._scores[order] > -torch.inf].sort().values
        number = torch.full_like(self._parents, -1)
        number[kept] = torch.arange(len(kept), device=kept.device)
        parents = self._parents[kept]
        parents[1:] = number[parents[1:]]
        ancestors = ancestor_matrix(parents)
        depth = ancestors.sum(-1) - 1
        return TokenTree(
            self._tokens[kept], parents, depth, ancestors, "deterministic", self._log_q[kept]
        )

    def _take(self, tokens: Tensor, log_q: Tensor) -> Tensor:
        """Add the n best nodes of every row of a pass, ``[F, rows, m]`` being its candidates.

        Returns:
            The block of each node of the last row, those of the best score first.
        """
        width = tokens.shape[-1]
        blocks = torch.arange(tokens.shape[0], device=tokens.device)
        above, scores = self._stands, self._scores[self._stands]
        size = self._tokens.shape[0]
        pool = [(self._tokens, self._parents, self._scores, self._log_q)]
        for row in range(tokens.shape[1]):
            grid = log_q[blocks, row]
            best = (scores.unsqueeze(1) + grid).flatten().sort(descending=True, stable=True)
            scores, chosen = best.values[: self._nodes], best.indices[: self._nodes]
            place, rank = chosen // width, chosen % width
            blocks = blocks[place]
            pool.append((tokens[blocks, row, rank], above[place], scores, grid.flatten()[chosen]))
            above = torch.arange(size, size + len(chosen), device=tokens.device)
            size += len(chosen)
        self._tokens, self._parents, self._scores, self._log_q = map(
            torch.cat, zip(*pool, strict=True)
        )
        self._stands = above
        return blocks

    def _frontier(self, blocks: Tensor) -> Frontier | None:
        """The best of the deepest nodes, which grew out of ``blocks``, while they may matter."""
        scores = self._scores[1:]
        # A node that does no more than equal the n-th best has nothing but worse ones below it.
        full = len(scores) >= self._nodes
        bar = scores.topk(self._nodes).values[-1] if full else -torch.inf
        beam = min(self.beam, self._nodes)
        alive = int((self._scores[self._stands[:beam]] > bar).sum())
        if alive == 0:
            return None
        self._stands = node = self._stands[:alive]
        path = []
        for _ in range(self.block):
            path.append(self._tokens[node])
            node = self._parents[node]
        return Frontier(torch.stack(path[::-1], dim=1), blocks[:alive])
