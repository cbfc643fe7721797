"""Begin a head as the least-squares solution of its task, in place of random weights.

The target's next feature is to a good part a linear function of the newest one and the next token:
on SmolLM2-135M-Instruct the best such function alone drafts 42 % of the tokens that the target
takes, which a head from random weights reaches after a million tokens or so. It follows from one
system of linear equations. The decoder blocks begin as the identity (the projections that end
their branches are zero), with the target's final norm, and training goes on from there.

What is regressed on is the feature before the final norm, up to its length, which that norm takes
away: (h - b) / w for a norm that computes w v + b of a normalised v.

A head with queries predicts k features from the newest fused token, by a map for each place. What
the k regressions have in common goes into the fuse: their fitted values' H strongest directions
(reduced-rank regression), of which the maps give each place its own.

A head that mixes tapped states with the features is regressed on all that is mixed: that part of
the fuse is the mixture, which the fuse then adds as it is. What stands for the mixture in a later
pass is its own regression on the feature.

Shapes: B batch, T tokens, n rows, E channels of an embedding, C of one and what is read beside it,
k places, H hidden.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.drafters.fusing import Fuse
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.least_squares import LeastSquares, solved, within
from falcon_lab.drafters.tapped_features import TappedFeatures
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, FirstWeights

ENDS_OF_BRANCHES = frozenset(
    {"o_proj", "out_proj", "c_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "fc_out"}
)
"""What families call the projections that end attention and MLP."""


class HeadWeights(FirstWeights):
    """Sets a head's weights to the least-squares solution.

    Args:
        head: whose fuse is linear.

    Raises:
        FalconLabError: the head has no such solution.
    """

    def __init__(self, head: HeadLayers) -> None:
        self._head, self._mix = head, _linear_fuse(head)
        last = head.block
        self._places = (last,) if head.maps is None else tuple(range(1, last + 1))
        self._sums = LeastSquares()

    def add(self, inputs: DrafterInputs, features: Tensor) -> None:
        """Add the rows that have an outcome at all places."""
        last = self._head.block
        # A document's last token is not among the inputs: it has no next one.
        whole = torch.cat([inputs.documents, inputs.documents[:, -1:]], dim=1)
        chosen = within(whole, last)
        count = chosen.shape[1]
        if not count:
            return
        joined = self._joined(inputs)[:, :count]
        outcomes = torch.stack([features[:, a : a + count] for a in self._places], dim=2)
        weight, bias = self._final_norm
        self._sums.add(joined[chosen], (outcomes[chosen] - bias) / weight)

    @cached_property
    def _final_norm(self) -> tuple[Tensor, Tensor]:
        """Return w and b of the target's final norm, which all documents share."""
        return _final_norm(self._head.host)

    def _joined(self, inputs: DrafterInputs) -> Tensor:
        """Return ``[B, T, C]``: what is joined with tokens, or what that is mixed of."""
        head = self._head
        if head.tapped is None:
            return head.join(inputs.tokens, head.read(inputs.features, inputs.taps))
        assert inputs.features is not None
        assert inputs.taps is not None
        return head.join(inputs.tokens, head.tapped.sources(inputs.features, inputs.taps))

    def assign(self) -> int:
        """Set the fuse and the maps, and close the branches of the decoder blocks.

        Raises:
            FalconLabError: blocks of the target's kind are not the identity then.
        """
        if self._sums.count:
            solution, intercept = self._sums.solve()
            with torch.no_grad():
                _close_branches(self._head)
                if self._head.maps is not None:
                    solution, intercept = _shared(self._head, self._sums, solution, intercept)
                if self._head.tapped is not None:
                    solution = _mixture(self._head.tapped, self._sums, solution)
                self._mix.weight.copy_(solution.T)
                self._mix.bias.copy_(intercept.flatten())
        return self._sums.count


def _linear_fuse(head: HeadLayers) -> nn.Linear:
    """Return the linear fuse that is to be set.

    Raises:
        FalconLabError: the head has no such solution.
    """
    fuse = head.fuse if "features" in head.needs else None
    if not (isinstance(fuse, Fuse) and isinstance(fuse.mix, nn.Linear)):
        raise FalconLabError(
            "distillation.least_squares sets the linear fuse of a head on the target's features, "
            f"and {type(head).__name__} has none; set drafter.fuse=linear, or "
            "distillation.least_squares=0"
        )
    if fuse.mix.bias is None:
        raise FalconLabError(
            f"distillation.least_squares: the linear fuse of {type(head).__name__} has no bias, "
            "which is part of the solution; give it one, or set distillation.least_squares=0"
        )
    if head.offsets is not None and head.maps is None:
        raise FalconLabError(
            "distillation.least_squares needs a map for every query; set drafter.query=mapped, or "
            "distillation.least_squares=0"
        )
    return fuse.mix


def _final_norm(target: Any) -> tuple[Tensor, Tensor]:
    """Return w and b of the target's final norm: what it makes of values of norm one."""
    probe = torch.ones(target.hidden_size, dtype=target.dtype, device=target.device)
    probe[1::2] = -1  # mean 0 and variance 1, so that every kind of norm leaves it as it is
    with torch.no_grad():
        one, other = target.backbone.final_norm(torch.stack([probe, -probe])[None])[0].float()
    weight, bias = (one - other) / 2 * probe.float(), (one + other) / 2
    small = weight.abs() < weight.abs().mean() * 1e-3
    return weight.masked_fill(small, float(weight.abs().mean())), bias


def _close_branches(head: HeadLayers) -> None:
    """Make the decoder blocks the identity, and give them the target's final norm.

    A fuse with a branch beside its linear layer has it closed too.
    """
    target, closed = head.host, 0
    for name, module in (*head.backbone.base.named_modules(), *head.fuse.named_modules()):
        if name.rpartition(".")[2] in ENDS_OF_BRANCHES and isinstance(module, nn.Linear):
            module.weight.zero_()
            closed += 1
            if module.bias is not None:
                module.bias.zero_()
    norm = head.backbone.final_norm
    norm.load_state_dict(target.backbone.final_norm.state_dict())
    first = next(head.backbone.parameters())
    rows = torch.linspace(-1, 1, 3 * target.hidden_size).sin().view(1, 3, -1).to(first)
    positions = torch.arange(3, device=first.device)[None]
    mask = torch.ones(1, 3, 3, dtype=torch.bool, device=first.device).tril()
    blocks = head.carried(head.backbone(embeddings=rows, positions=positions, mask=mask))
    normed = norm(rows) if head.tapped is None else head.tapped.expected(norm(rows))
    if not torch.allclose(blocks, normed, atol=1e-3):
        raise FalconLabError(
            f"distillation.least_squares: decoder blocks of the kind of {target.name} do not begin "
            f"as the identity when the {closed} projections that end their branches are zero; set "
            "distillation.least_squares=0"
        )


def _shared(
    head: HeadLayers, sums: LeastSquares, solution: Tensor, intercept: Tensor
) -> tuple[Tensor, Tensor]:
    """Split the solutions of k places into a map for each place, and the fuse that is returned."""
    assert head.maps is not None
    assert head.offsets is not None
    width = head.maps.shape[1]
    mean = sums.given[-1, :-1] / sums.count
    covariance = sums.given[:-1, :-1] / sums.count - mean.outer(mean)
    fitted = solution.T @ covariance @ solution  # [k·H, k·H]
    strongest = torch.linalg.eigh(fitted).eigenvectors[:, -width:]
    shared = solution @ strongest  # [C, H]
    head.maps.copy_(strongest.unflatten(0, (-1, width)).transpose(1, 2))
    head.offsets.copy_((intercept + mean @ solution).view_as(head.offsets))
    return shared, -mean @ shared  # what is fused has mean zero


def _mixture(tapped: TappedFeatures, sums: LeastSquares, solution: Tensor) -> Tensor:
    """Set what mixes to its part of the fuse, ``[C, H]``; return the fuse of a mixture, [E + H, H].

    Rows of ``given`` are the embedding, the feature, the tapped states and a one.
    """
    mixed, width = tapped.mix.in_features, tapped.mix.out_features
    embedding = len(solution) - mixed
    tapped.mix.weight.copy_(solution[embedding:].T)
    feature = [*range(embedding, embedding + width), -1]
    expected = sums.given[feature]
    both = expected[:, embedding:-1] @ solution[embedding:]
    found, offset = solved(expected[:, feature], both, intercept=True)
    tapped.expected.weight.copy_(found.T)
    tapped.expected.bias.copy_(offset[0])
    return torch.cat([solution[:embedding], torch.eye(width).to(solution)])
