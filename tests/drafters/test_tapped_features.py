"""Hidden states of the target's layers, mixed with the features that a head reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_cases import drafter
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.tapped_features import TappedFeatures
from falcon_lab.interfaces import BuildContext, DrafterInputs
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.testing import check_drafter
from tiny_models import tiny_target


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_at_first_the_mixture_is_the_feature_and_so_is_what_stands_for_it() -> None:
    tapped = TappedFeatures(2, 8)
    features = states(3, 8)
    assert torch.equal(tapped(features, states(3, 2, 8, seed=1)), features)
    assert torch.equal(tapped.expected(features), features)


def test_a_state_counts_by_its_direction_whatever_its_length() -> None:
    tapped = TappedFeatures(2, 8)
    torch.nn.init.normal_(tapped.mix.weight)
    features, taps = states(3, 8), states(3, 2, 8, seed=1)
    found = tapped(features, taps)
    assert torch.allclose(tapped(features, 1000 * taps), found, atol=1e-5)
    assert not torch.allclose(tapped(features, taps.flip(1)), found, atol=0.1)
    assert tapped(features, torch.zeros_like(taps)).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"block": 2, "fuse": "linear", "query": "mapped"},
        {"block": 2, "fuse": "lstm"},
        {"block": 1, "fuse": "linear", "draft_vocabulary": 16},
    ],
)
def test_a_head_that_reads_layers_keeps_what_every_drafter_promises(
    options: dict[str, Any],
) -> None:
    def build(context: BuildContext) -> FalconDrafter:
        torch.manual_seed(0)
        made = FalconDrafter(FalconConfig(taps=[1, 0], **options), context)
        with torch.no_grad():  # neither the feature itself, nor its own successor
            for weight in made.tapped.parameters():  # type: ignore[union-attr]
                weight.add_(0.2 * torch.randn_like(weight))
        return made

    check_drafter(build)


def test_what_is_read_of_a_layer_reaches_what_is_drafted() -> None:
    made = drafter(taps=[1], block=2, fuse="linear")
    tokens = torch.arange(9)[None]
    predicted = []
    for seed in (1, 2):
        inputs = DrafterInputs(
            tokens=tokens,
            features=states(1, 9, 32).double(),
            documents=torch.zeros_like(tokens),
            positions=tokens,
            generator=torch.Generator().manual_seed(0),
            taps=states(1, 9, 1, 32, seed=seed).double(),
        )
        found = made.predict(inputs, torch.zeros_like(tokens)).features
        assert found is not None
        predicted.append(found)
    assert not torch.allclose(*predicted, atol=1e-3)


def test_without_taps_nothing_is_added_to_a_head() -> None:
    made = FalconDrafter(FalconConfig(), BuildContext(tiny_target()))
    assert made.taps == ()
    assert not any("tapped" in name for name in made.state_dict())
