"""The sample distribution works: a plug-in written against the interfaces alone needs no more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from falcon_lab import testing
from falcon_lab.interfaces import (
    BuildContext,
    Drafter,
    Frontier,
    GlanceRows,
    Observation,
    is_trainable,
)
from falcon_lab.plugins.registry import Components


@pytest.fixture
def components(monkeypatch: pytest.MonkeyPatch) -> Iterator[Components]:
    folder = Path(__file__).parent / "sample_plugin"
    monkeypatch.syspath_prepend(str(folder / "src"))
    yield testing.components_of(folder)
    for name in [name for name in sys.modules if name.startswith("falcon_lab_sample")]:
        del sys.modules[name]


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_decoding_with_the_samples_is_lossless(
    components: Components, width: int, depth: int
) -> None:
    target = testing.tiny_target()
    drafter = testing.build_drafter(target, {"name": "sample-mlp"}, components=components)
    node = {"name": "sample-rake", "width": width, "depth": depth}
    engine = testing.engine(target, drafter, tree=node, components=components)
    testing.lossless_rounds(engine, [[5], [7, 9, 11, 3], [20, 21]], 12)


def test_the_drafter_learns_and_drafts_as_it_was_trained(components: Components) -> None:
    target = testing.tiny_target()
    drafter = testing.build_drafter(target, {"name": "sample-mlp"}, components=components)
    assert isinstance(drafter, Drafter)
    assert is_trainable(drafter)
    tokens = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = testing.packed([[row] for row in tokens])
    inputs = testing.training_inputs(target, drafter, batch, torch.Generator().manual_seed(0))
    losses = []
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(30):
        prediction = drafter(inputs)
        counts = prediction.label < inputs.features.shape[1]
        labels = inputs.features.gather(
            1, prediction.label.clamp_max(7)[..., None].expand_as(inputs.features)
        )
        loss = (prediction.features - labels)[counts].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2

    drafter.reset(inputs.tokens[0, 0])
    drafter.observe(Observation(inputs.tokens[0, :5], inputs.features[0, :5]))
    drafted = drafter.draft(Frontier.root(torch.device("cpu"))).features
    torch.testing.assert_close(drafted[0, 0], drafter(inputs).features[0, 4].detach())


def test_the_schedule_shows_wrong_rows_that_are_not_the_last_of_their_block(
    components: Components,
) -> None:
    target = testing.tiny_target()
    schedule = components.build(
        "schedule", {"name": "sample-step", "ratio": 1.0, "until": 0.5}, BuildContext(target)
    )
    assert (schedule.ratio(0.2), schedule.ratio(0.5)) == (1.0, 0.0)
    wrong = torch.tensor([[True, True, False, True]])
    slot = torch.tensor([[0, 1, 0, 1]])
    glance = GlanceRows(wrong, torch.ones_like(wrong), slot, torch.tensor([[0, 0, 1, 1]]), 2)
    shown = schedule.reveal(glance, 1.0, torch.Generator().manual_seed(0))
    assert shown.tolist() == [[True, False, False, False]]
