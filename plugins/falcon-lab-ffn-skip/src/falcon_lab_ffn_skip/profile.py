"""What skipping costs a target: cosines layer by layer, and perplexity by threshold.

    python -m falcon_lab_ffn_skip profile TARGET text.txt another.txt

Cold regions are where cosines are low: choose ``first`` and ``last`` by the table of layers, and
``threshold`` by the one of thresholds.

Shapes: T tokens, n tokens of a pass, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from falcon_lab.interfaces import LayerPlan
from falcon_lab.model.target import Target
from falcon_lab_ffn_skip import FfnSkipConfig
from falcon_lab_ffn_skip.skipping import Saturation

THRESHOLDS = (2.0, 0.995, 0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.92, 0.9, 0.8)
"""Cosines; nothing reaches the first one, which leaves the target as it is."""


@dataclass(frozen=True)
class Point:
    """A threshold with what it costs and saves.

    Attributes:
        threshold: of the cosine.
        skipped: share of all networks that are left out, 0 to 1.
        perplexity: of the texts.
    """

    threshold: float
    skipped: float
    perplexity: float


class Cosines:
    """An ``MlpGate`` that lets everything through, and adds up the cosines of every layer.

    Args:
        layers: that the model has.
    """

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(layers, dtype=torch.double)
        self._counts = torch.zeros(layers, dtype=torch.double)

    @property
    def means(self) -> list[float]:
        """Return the mean of every layer."""
        found: list[float] = (self._sums / self._counts).tolist()
        return found

    def begin(self, positions: Tensor) -> None:
        """Do nothing: every pass is alike."""

    def wanted(self, layer: int) -> Tensor | None:
        """Return None: all tokens."""
        return None

    def seen(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Add the cosines of a layer."""
        alike = functional.cosine_similarity(before.float(), after.float(), dim=-1)
        self._sums[layer] += float(alike.sum())
        self._counts[layer] += len(alike)


@torch.inference_mode()
def mean_cosines(target: Target, texts: Sequence[Tensor]) -> list[float]:
    """Return each layer's mean cosine of the states before and behind its network.

    Args:
        target: the model.
        texts: ``[T]`` long each.
    """
    gate = Cosines(target.config.num_hidden_layers)
    for text in texts:
        _features(target, text, LayerPlan(gate=gate))
    return gate.means


@torch.inference_mode()
def curve(
    target: Target,
    texts: Sequence[Tensor],
    config: FfnSkipConfig,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Iterator[Point]:
    """Yield what every threshold costs in perplexity, and saves in networks.

    Args:
        target: the model.
        texts: ``[T]`` long each, at least two tokens.
        config: the other options.
        thresholds: of the cosine.
    """
    for threshold in thresholds:
        gate = Saturation(replace(config, threshold=threshold), target.config.num_hidden_layers)
        loss, count = 0.0, 0
        for text in texts:
            logits = target.head(_features(target, text, LayerPlan(gate=gate)))
            loss += float(functional.cross_entropy(logits[:-1].float(), text[1:], reduction="sum"))
            count += len(text) - 1
        yield Point(threshold, gate.share, float(torch.tensor(loss / count).exp()))


def _features(target: Target, text: Tensor, plan: LayerPlan) -> Tensor:
    """Return ``[T, H]`` of a text that is read in one pass under a plan."""
    positions = torch.arange(len(text), device=text.device)[None]
    mask = torch.ones(1, len(text), len(text), dtype=torch.bool, device=text.device).tril()
    cache = target.backbone.new_cache(len(text))
    found: Tensor = target.backbone(
        tokens=text[None], positions=positions, mask=mask, cache=cache, plan=plan
    )[0]
    return found


def tables(target: Target, texts: Sequence[Tensor], config: FfnSkipConfig) -> Iterator[str]:
    """Yield the lines of both tables, as they are computed."""
    yield "layer  mean cosine of the states around its network"
    for layer, mean in enumerate(mean_cosines(target, texts)):
        yield f"{layer:5}  {mean:.4f}"
    yield ""
    yield "threshold  networks left out  perplexity"
    for point in curve(target, texts, config):
        name = "none" if point.threshold > 1 else f"{point.threshold:.3f}"
        yield f"{name:>9}  {point.skipped:16.1%}  {point.perplexity:10.3f}"
