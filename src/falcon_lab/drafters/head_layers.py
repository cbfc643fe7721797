"""The layers of a head on the target's features, which its training and its drafting go through.

Shapes: B batch, R prediction rows, k block, C channels of a joined row, L tapped layers, H hidden,
V vocabulary of the target, n of the head's logits: V, or fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from falcon_lab.drafters.fusing import Fusing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterHost, DraftVocabulary, LayerPlan, Prediction
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.lean import WHOLE

if TYPE_CHECKING:
    from falcon_lab.drafters.tapped_features import TappedFeatures
    from falcon_lab.model.torch_compile import Compiled, Compiler

FLEX = "flex_attention"


class Rows(NamedTuple):
    """Say what R prediction rows are about, ``[B, R]`` long each: as in ``Prediction``."""

    label: Tensor
    source: Tensor
    slot: Tensor
    group: Tensor


class HeadLayers(nn.Module):
    """Join tokens with features, fuse them in time, and send them through decoder blocks.

    The weights are those of ``fuse``, ``backbone``, ``offsets``, ``maps`` and ``tapped``, and what
    a subclass adds.

    Attributes:
        block: k.
        needs: what it reads of the target, as ``Drafter.needs``.
        aligned: whether the newest k rows are one block and training covers every phase; else
            blocks sit at multiples of k.
        offsets: ``[k, H]``, for a head whose k predictions are all asked from the newest row, each
            by a query of its own; None: the last k rows predict.
        maps: ``[k, C, H]``, which make the queries of the newest row, before their offsets; None:
            a query is the newest row itself.
        tapped: mixes hidden states of the layers that are tapped with the features; None: the
            features alone are read.
        draft_vocabulary: the tokens that its logits are about; None: all of the target's.

    Args:
        host: the frozen target.
        fuse: joined rows to what the decoder blocks read.
        backbone: the decoder blocks.
        block: k.
        aligned: see above.
        offsets: see above.
        maps: see above.
        tapped: see above.
        vocabulary: ``draft_vocabulary``.
    """

    needs: frozenset[str]

    def __init__(
        self,
        host: DrafterHost,
        fuse: Fusing,
        backbone: Backbone,
        *,
        block: int = 1,
        aligned: bool = True,
        offsets: nn.Parameter | None = None,
        maps: nn.Parameter | None = None,
        tapped: TappedFeatures | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.aligned = aligned
        self.host: Any = host
        self.fuse = fuse
        self.backbone = backbone
        self.offsets = offsets
        self.maps = maps
        self.tapped = tapped
        self.draft_vocabulary = vocabulary
        self._compiled: Compiled | None = None
        self._part: tuple[LayerPlan, RowsThatAreRead] | None = None

    def read(self, features: Tensor | None, taps: Tensor | None) -> Tensor:
        """Return what is joined with a token of a true position: features, or their mixture.

        A head that reads layers in another way makes it of ``taps``, ``[..., L, H]``.

        Returns:
            ``[..., H]``, as wide as what is ``carried`` of the decoder blocks' outputs.
        """
        if features is None:
            raise ValueError(f"{type(self).__name__} needs target features with every observation")
        if self.tapped is None:
            return features
        if taps is None:
            raise ValueError(f"{type(self).__name__} reads layers of the target, and has none")
        mixture: Tensor = self.tapped(features, taps)
        return mixture

    def join(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Join ``[..., n]`` tokens and ``[..., n, H]`` features: ``[..., n, C]``."""
        embedded = self.host.embed(tokens)
        return torch.cat([embedded, features.to(embedded.dtype)], dim=-1)

    def queries(self, newest: Tensor) -> Tensor:
        """Return the k queries of newest fused rows: ``[..., C]`` -> ``[..., k, H]``."""
        assert self.offsets is not None
        if self.maps is None:
            return newest.unsqueeze(-2) + self.offsets
        return torch.einsum("...c,kch->...kh", newest, self.maps) + self.offsets

    def carried(self, hidden: Tensor) -> Tensor:
        """Return what a later pass reads in place of a feature: the blocks' outputs themselves.

        Where features are mixed with tapped states, it is the mixture that goes with them. A head
        whose outputs are wider than that returns a part of them, ``[..., H]``.
        """
        if self.tapped is None:
            return hidden
        expected: Tensor = self.tapped.expected(hidden)
        return expected

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the blocks' outputs, ``[..., H]``, into ``[..., n]`` by the target's LM head."""
        words = self.draft_vocabulary or self.host
        logits: Tensor = words.head(hidden.to(self.host.dtype))
        return logits

    def predicted(self, hidden: Tensor, where: Rows) -> Prediction:
        """Return the prediction of training: here ``hidden``, ``[B, R, H]``, are features."""
        return Prediction(hidden, None, *where)

    def compile_training(self, compiler: Compiler = torch.compile) -> None:
        """Send the decoder blocks of a training pass through ``torch.compile``.

        Fusing is left as it is, and decoding has shapes of its own.
        """
        from falcon_lab.model.torch_compile import Compiled  # training eagerly stands without

        self._compiled = Compiled(self.backbone, "the drafter's decoder blocks", compiler)

    @property
    def contexts_attend(self) -> bool:
        """Whether anything reads what a context attends to, where k queries stand behind contexts.

        Keys and values of the first layer are made before its attention, and those of the last
        are all that is read of a context.
        """
        return self.backbone.config.num_hidden_layers > 1

    def train_blocks(self, *, read: int | None = None, **arguments: Any) -> Tensor:
        """Run the decoder blocks of a training pass.

        Args:
            read: how many rows, the last ones, are read of what comes out; None: all. The others
                do not go through the last layer's feed-forward network.
            arguments: ``Backbone.forward``'s.

        Returns:
            ``[B, R, H]``, of the rows that are read.
        """
        positions: Tensor = arguments["positions"]
        on_cpu = positions.device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and self.backbone.implementation == FLEX:
            raise FalconLabError(
                f"{FLEX} has no backward pass on a CPU; train with target.attention=sdpa"
            )
        if read == positions.shape[1]:
            read = None
        hidden: Tensor
        if self.training and "cache" not in arguments and self._compiled is not None:
            hidden = self._compiled(**arguments)
        else:
            plan = WHOLE if read is None else self._reading(positions.shape[0], read)
            hidden = self.backbone(**arguments, plan=plan)
        return hidden if read is None else hidden[:, -read:]

    def _reading(self, batch: int, read: int) -> LayerPlan:
        """Return what a pass goes through; everything, where the network has an unknown name."""
        if self._part is None:
            last = self.backbone.config.num_hidden_layers - 1
            gate = RowsThatAreRead(last)
            plan = LayerPlan(gate=gate)
            self._part = (plan if self.backbone.can_follow(plan) else WHOLE), gate
        plan, gate = self._part
        gate.shape = batch, read
        return plan


class RowsThatAreRead:
    """Have the last rows of a pass alone go through the last layer's network (an ``MlpGate``).

    Attributes:
        shape: sequences of the next pass, and rows of each that are read.

    Args:
        layer: the last.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.shape = 0, 0

    def begin(self, positions: Tensor) -> None:
        """Find out which rows of a pass are read."""
        batch, read = self.shape
        wanted = torch.zeros_like(positions, dtype=torch.bool)
        wanted.view(batch, -1)[:, -read:] = True
        self._wanted = wanted

    def wanted(self, layer: int) -> Tensor | None:
        """Return which rows go through a layer's network; None: all of them."""
        return self._wanted if layer == self._layer else None

    def seen(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Take no notice."""
