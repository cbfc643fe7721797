"""Trees of a fixed shape: a chain, or a template drawn by hand or computed ahead of time.

Shapes: N nodes (the root counted), F blocks of a pass, k block, m candidates of a row, n nodes that
a pass decides, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext, TreeBuilder
from falcon_lab.plugins.builtins import ChainConfig, StaticConfig
from falcon_lab.sampling import Sampling
from falcon_lab.tree import CHOSEN, Proposal, TokenTree
from falcon_lab.trees.layout import Layout, PassLayout, build_layout
from falcon_lab.trees.paths import Path
from falcon_lab.trees.templates import cut, resolve


class TemplateTree(TreeBuilder):
    """Fill a tree of fixed shape with tokens that the drafter chooses.

    A node whose candidate the drafter did not propose (``-inf``, or a row that is not there) is
    dropped with all that is below it. With greedy sampling, and with ``proposal="deterministic"``,
    the children of a node are the row's most likely tokens; otherwise they are drawn from the
    row's distribution q without replacement (Gumbel top-m), and the tree carries q.

    Args:
        paths: the template, as ``checked`` returns it.
        block: k of the drafter.
        proposal: how tokens are chosen at T > 0.
    """

    def __init__(self, paths: Sequence[Path], block: int, proposal: Proposal) -> None:
        self.paths = tuple(paths)
        self.block = block
        self.proposal = proposal
        self.max_depth = max((len(path) for path in self.paths), default=0)
        self.max_nodes = len(self.paths) + 1
        self._layouts: dict[tuple[int, int, torch.device], Layout] = {}
        self._roots: dict[torch.device, _Root] = {}

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._context = context
        self._layout = self._layout_for(context)
        greedy = context.sampling.greedy
        self._proposal: Proposal = "deterministic" if greedy else self.proposal
        self._next = 0
        root = self._root_on(context.root.device)
        self._tokens = context.root.reshape(1)
        self._log_q = [root.log_q]  # of each pass
        self._q: list[Tensor] = []
        self._q_row = root.q_row
        self._some_are_chosen = False
        self._alive: Tensor | None = None  # [N] bool once something was dropped
        self._blocks: Tensor | None = None  # [F'] blocks that this pass expands; None: all
        return root.frontier if self._layout.passes else None

    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take in the candidates of one pass."""
        plan = self._layout.passes[self._next]
        tokens, log_q, q = candidates(output, plan.width, self._proposal, self._context)
        if tokens.shape != (plan.stands.shape[0], self.block, plan.width):
            tokens = self._spread(tokens, plan, plan.width, 0)
            log_q = self._spread(log_q, plan, plan.width, -torch.inf)
        self._tokens = torch.cat((self._tokens, tokens.take(plan.slots)))
        self._log_q.append(log_q.take(plan.slots))
        if self._proposal == "sampled":
            self._add_q(q, plan)
        if not self._is_whole(output, plan):
            self._drop_missing(plan)
        self._next += 1
        return self._frontier()

    def finish(self) -> TokenTree:
        """Return the nodes that the passes so far have decided."""
        layout, nodes = self._layout, self._tokens.shape[0]
        parents, depth = layout.parents[:nodes], layout.depth[:nodes]
        ancestors = layout.ancestors[:nodes, :nodes]
        tokens, log_q, q_row = self._tokens, torch.cat(self._log_q), self._q_row
        routes: Tensor | None = layout.routes[:nodes, : len(layout.paths[nodes - 1]) + 1]
        if self._alive is not None:
            routes = None
            kept = self._alive.nonzero().flatten()
            number = self._alive.cumsum(0) - 1
            parents = torch.where(parents[kept] < 0, -1, number[parents[kept]])
            depth, ancestors = depth[kept], ancestors[kept][:, kept]
            tokens, log_q = tokens[kept], log_q[kept]
            q_row = q_row[kept] if self._q else q_row
        proposal: Proposal = "deterministic"
        if not self._q:
            return TokenTree(tokens, parents, depth, ancestors, proposal, log_q, routes=routes)
        proposal = "mixed" if self._some_are_chosen else "sampled"
        q = torch.cat(self._q)
        return TokenTree(tokens, parents, depth, ancestors, proposal, log_q, q, q_row, routes)

    def _root_on(self, device: torch.device) -> _Root:
        """Return what every tree begins with, made once for each device."""
        if device not in self._roots:
            with torch.inference_mode(False):
                self._roots[device] = _Root(
                    Frontier.root(device),
                    torch.zeros(1, device=device),
                    torch.full((1,), -1, device=device),
                )
        return self._roots[device]

    def _layout_for(self, context: RoundContext) -> Layout:
        """Return the layout of the template cut to the budget; each is built once."""
        depth, nodes = context.budget.limit(
            depth=self.max_depth, nodes=self.max_nodes - 1, block=self.block
        )
        key = (depth, nodes, context.root.device)
        if key not in self._layouts:
            part = cut(self.paths, self.block, depth=depth, nodes=nodes)
            self._layouts[key] = build_layout(part, self.block).to(context.root.device)
        return self._layouts[key]

    def _spread(self, values: Tensor, plan: PassLayout, last: int, fill: float) -> Tensor:
        """Spread ``[F', rows, …]`` of the blocks expanded over ``[F, k, last]``, gaps filled."""
        blocks = plan.stands.shape[0]
        full = values.new_full((blocks, self.block, last), fill)
        where = torch.arange(blocks, device=full.device) if self._blocks is None else self._blocks
        full[where, : values.shape[1], : values.shape[2]] = values
        return full

    def _add_q(self, q: Tensor | None, plan: PassLayout) -> None:
        """Add ``[F', rows, V]`` distributions, and the row of each new node; None if chosen."""
        if q is None:
            self._some_are_chosen = True
            self._q_row = torch.cat((self._q_row, torch.full_like(plan.rows, CHOSEN)))
            return
        blocks = plan.stands.shape[0]
        if q.shape[:2] != (blocks, self.block):
            q = self._spread(q, plan, q.shape[-1], 0.0)
        before = sum(rows.shape[0] for rows in self._q)
        self._q.append(q.flatten(0, 1))
        self._q_row = torch.cat((self._q_row, plan.rows + before))

    def _is_whole(self, output: DraftOutput, plan: PassLayout) -> bool:
        """Return whether a pass proposes every candidate, without waiting for the device."""
        blocks, rows, vocabulary = output.logits.shape
        promised = output.all_proposed and self._proposal == "deterministic"
        return (
            promised
            and self._alive is None
            and (blocks, rows) == (plan.stands.shape[0], self.block)
            and vocabulary >= plan.width
        )

    def _drop_missing(self, plan: PassLayout) -> None:
        """Drop the nodes that the drafter did not propose, and all below them."""
        proposed = torch.cat(self._log_q).isfinite()
        if self._alive is None and bool(proposed.all()):
            return
        known = self._layout.ancestors[: plan.last, : plan.last]
        self._alive = ~(known & ~proposed).any(-1)

    def _frontier(self) -> Frontier | None:
        """Return the blocks of the next pass whose nodes were not dropped."""
        if self._next == len(self._layout.passes):
            return None
        plan = self._layout.passes[self._next]
        tokens, parents = self._tokens.take(plan.path), plan.parents
        if self._alive is None:
            return Frontier(tokens, parents)
        before, self._blocks = self._blocks, self._alive[plan.stands].nonzero().flatten()
        if self._blocks.numel() == 0:
            return None
        parents = parents[self._blocks]
        if before is not None:  # parents count the blocks that the drafter has expanded
            parents = torch.searchsorted(before, parents)
        return Frontier(tokens[self._blocks], parents)


class _Root(NamedTuple):
    """Hold what the root of every round's tree has in common.

    Attributes:
        frontier: the first.
        log_q: ``[1]``.
        q_row: ``[1]`` long.
    """

    frontier: Frontier
    log_q: Tensor
    q_row: Tensor


def candidates(
    output: DraftOutput, width: int, proposal: Proposal, context: RoundContext
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a pass's candidates: tokens and log q, both ``[F, rows, m]``, and q if it was sampled.

    Where no row proposes more than one token (text that was looked up) there is nothing to draw:
    the token is chosen, which has the law of drawing it and spares q.

    Tokens come best first, or in the order in which they were drawn. What is not proposed has log
    q ``-inf``; m is less than ``width`` when the vocabulary is.

    Here, and nowhere later, columns of a draft vocabulary become the target's tokens.
    """
    width = min(width, output.logits.shape[-1])
    if proposal == "sampled" and not is_certain(output):
        columns, log_q, q = draw_without_replacement(
            output.logits, width, context.sampling, context.generator
        )
        return output.target_tokens(columns), log_q, output.over_target(q)
    log_q, columns = output.log_probabilities.topk(width, dim=-1)
    if not output.all_proposed:
        log_q = log_q.where(log_q.isfinite(), -torch.inf)
    return output.target_tokens(columns), log_q, None


def is_certain(output: DraftOutput) -> bool:
    """Return whether no row of a pass proposes more than one token."""
    return not output.all_proposed and bool((output.logits > -torch.inf).sum(-1).le(1).all())


def draw_without_replacement(
    logits: Tensor, width: int, sampling: Sampling, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample ``width`` tokens from each row's q without replacement; return them in order.

    The largest of log q + Gumbel noise are such a sample (Kool et al., arXiv 1903.06059, §2.2).
    """
    q = sampling.probabilities(logits).nan_to_num(0.0)  # a row of -inf alone proposes nothing
    noise = torch.empty_like(q).exponential_(generator=generator).log()
    tokens = (q.log() - noise).topk(width, dim=-1).indices
    return tokens, q.gather(-1, tokens).log(), q


class Chain(TemplateTree):
    """Draft one path of ``config.depth`` tokens; of depth 0 it is the root alone.

    Args:
        config: the length, and how tokens are chosen at T > 0.
        context: gives k.
    """

    def __init__(self, config: ChainConfig, context: BuildContext) -> None:
        paths = [(0,) * length for length in range(1, context.reach(config.depth) + 1)]
        super().__init__(paths, context.block, cast(Proposal, config.proposal))


class StaticTree(TemplateTree):
    """Draft Falcon's custom-designed decoding tree (arXiv 2412.12639, §3.4), for any k.

    Args:
        config: the template and how tokens are chosen at T > 0.
        context: gives k.

    Raises:
        FalconLabError: the template has duplicates, gaps or orphans, or its name is unknown.
    """

    def __init__(self, config: StaticConfig, context: BuildContext) -> None:
        paths = resolve(config.template, context)
        depths = [depth for depth in (config.max_depth, context.deepest) if depth is not None]
        paths = cut(paths, context.block, depth=min(depths, default=None))
        super().__init__(paths, context.block, cast(Proposal, config.proposal))
