"""Hidden Transfer (arXiv 2404.12022): linear maps carry a hidden state into later positions.

At layer t of the target, the state of a token at position p becomes the states of k pseudo
positions p + 1 to p + k, one by each of k linear maps. They run through the rest of the layers
behind the token itself, and the target's own LM head says there what follows: pseudo position j
guesses the token at p + 1 + j. Every node of a token tree carries pseudo positions of its own, so
that the pass which verifies a tree also drafts the next one.

Shapes: B batch, T tokens, S trained positions of a sequence, k block, C tree nodes, P = C·k pseudo
positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    Acceptance,
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.masks import packed_mask
from falcon_lab.tree import AuxiliaryNodes, Entrance, TokenTree
from falcon_lab_hidden_transfer import HiddenTransferConfig

MOST = 1024
"""Pseudo positions of a round; a larger tree is verified without, and nothing is drafted next."""


class HiddenTransfer(TrainableDrafter):
    """k linear maps between hidden states of one of the target's layers.

    The first round of a text drafts nothing: a prompt is read without pseudo positions.

    Attributes:
        block: k.
        needs: no features.
        taps: the layer's input, which training reads.
        max_passes: one; all k guesses are there when a round begins.
        maps: ``[k, H, H]``, the identity at first.

    Args:
        config: the options.
        context: gives the target.

    Raises:
        FalconLabError: the target has no such layer.
    """

    needs: frozenset[str] = frozenset()
    max_passes = 1
    max_auxiliary = MOST

    def __init__(self, config: HiddenTransferConfig, context: BuildContext) -> None:
        super().__init__()
        self.host: Any = context.host
        self.block, self._rows = config.block, config.rows
        count = self.host.config.num_hidden_layers
        layer = config.layer if config.layer is not None else max(1, 2 * count // 3)
        if layer >= count:
            raise FalconLabError(
                f"drafter.layer is {layer}, and the target has the layers 0 to {count - 1}; "
                "hidden states are carried over where at least one layer follows"
            )
        self.layer, self.taps = layer, (layer,)
        hidden = self.host.hidden_size
        self.maps = nn.Parameter(torch.eye(hidden).repeat(self.block, 1, 1))
        self._guesses: Tensor | None = None  # [k, V] after the newest token

    def carried(self, states: Tensor) -> Tensor:
        """Map states ``[..., H]`` to those of the pseudo positions behind each, ``[..., k, H]``."""
        return torch.einsum("...h,koh->...ko", states.to(self.maps.dtype), self.maps)

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict k rows behind some of the positions, by the target's own upper layers.

        Raises:
            FalconLabError: a glancing schedule wants to show it labels.
        """
        if reveal is not None:
            raise FalconLabError(
                "drafter hidden_transfer reads no tokens beyond the true ones, so that no label "
                "could be shown to it; set glancing.name=none"
            )
        assert inputs.taps is not None
        batch, tokens = inputs.tokens.shape
        source = self._chosen(inputs)  # [B, S]
        step = torch.arange(1, self.block + 1, device=source.device)
        states = inputs.taps[:, :, 0]
        width = states.shape[-1]
        made = self.carried(states.gather(1, source[..., None].expand(-1, -1, width)))
        positions = inputs.positions.gather(1, source)[..., None] + step
        features = self.host.run_upper(
            self.layer,
            torch.cat((states, made.flatten(1, 2).to(states.dtype)), 1),
            torch.cat((inputs.positions, positions.flatten(1)), 1),
            training_mask(packed_mask(inputs.documents), source, self.block),
        )[:, tokens:]
        slot = torch.arange(self.block, device=source.device).repeat(source.shape[1])
        group = source.repeat_interleave(self.block, 1)
        return Prediction(
            features=features,
            logits=None,
            label=group + 1 + slot,
            source=group,
            slot=slot.expand(batch, -1),
            group=group,
        )

    def _chosen(self, inputs: DrafterInputs) -> Tensor:
        """Draw the positions ``[B, S]`` of every sequence that are trained, in rising order."""
        batch, tokens = inputs.tokens.shape
        if tokens <= self._rows:
            return torch.arange(tokens, device=inputs.tokens.device).expand(batch, -1)
        device = inputs.generator.device
        drawn = torch.rand(batch, tokens, generator=inputs.generator, device=device)
        chosen: Tensor = drawn.topk(self._rows).indices.sort().values
        return chosen.to(inputs.tokens.device)

    # --- drafting ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Forget the sequence."""
        self._guesses = None

    def observe(self, observation: Observation) -> None:
        """Do nothing: what is known comes from the pseudo positions."""

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return the guesses of the latest pass for the root, and nothing below it."""
        blocks = frontier.tokens.shape[0]
        if frontier.tokens.shape[1] or self._guesses is None:
            device = frontier.tokens.device
            return DraftOutput(torch.empty(blocks, 0, self.host.vocab_size, device=device))
        return DraftOutput(self._guesses[None], all_proposed=True)

    def most_auxiliary(self, tree: TreeBuilder) -> int:
        """Return k for every node of the largest tree, as far as ``MOST`` goes."""
        return min(MOST, tree.max_nodes * self.block)

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        """Return k pseudo positions for every node, as far as the text can still grow."""
        self._guesses = None
        most = min(self.block, max_depth - tree.max_depth)
        if most < 1 or tree.nodes * most > self.max_auxiliary:
            return None
        step = torch.arange(1, most + 1, device=tree.tokens.device)
        node = torch.arange(tree.nodes, device=tree.tokens.device).repeat_interleave(most)
        return AuxiliaryNodes(
            torch.zeros_like(node),
            (tree.depth[:, None] + step).flatten(),
            torch.cat((tree.ancestors[node], earlier_of_the_same(node)), 1),
            Entrance(self.layer, self._entering(most)),
        )

    def _entering(self, most: int) -> Any:
        def states(below: Tensor) -> Tensor:
            return self.carried(below)[:, :most].flatten(0, 1).to(below.dtype)

        return states

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        """Keep what the pseudo positions behind the newest committed token guess."""
        count = tree.parents.shape[0]
        guesses = logits[count:].view(count, -1, logits.shape[-1])
        self._guesses = guesses.index_select(0, acceptance.path[-1:])[0].clone()


def earlier_of_the_same(node: Tensor) -> Tensor:
    """Return which pseudo positions each one attends to: those before it of its own node.

    Args:
        node: ``[..., P]`` long, of each pseudo position, in their order.

    Returns:
        ``[..., P, P]`` bool, itself among them.
    """
    same = node[..., :, None] == node[..., None, :]
    return same & torch.ones_like(same).tril()


def training_mask(real: Tensor, source: Tensor, block: int) -> Tensor:
    """Return the mask of true positions with pseudo positions behind some of them.

    Args:
        real: ``[B, T, T]`` bool, of the true positions.
        source: ``[B, S]`` long, those that have pseudo positions.
        block: k of each.

    Returns:
        ``[B, T + S·k, T + S·k]`` bool; no true position attends to a pseudo one.
    """
    batch, tokens = real.shape[:2]
    behind = source.repeat_interleave(block, 1)  # [B, S·k]
    seen = real.gather(1, behind[..., None].expand(-1, -1, tokens))
    pseudo = torch.cat((seen, earlier_of_the_same(behind)), 2)
    nothing = real.new_zeros(batch, tokens, behind.shape[1])
    return torch.cat((torch.cat((real, nothing), 2), pseudo), 1)
