"""The sample distribution works: a plug-in written against the protocols alone needs no more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.acceptance.auto import Auto
from falcon_lab.builtins import FixedConfig
from falcon_lab.components import Components
from falcon_lab.controllers.fixed import Fixed
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.losslessness import greedy_equality
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.plugins import Registrar
from falcon_lab.protocols import (
    BuildContext,
    DrafterInputs,
    Frontier,
    GlanceRows,
    Observation,
    TrainableDrafter,
    is_trainable,
)
from tiny_models import tiny_target


@pytest.fixture
def components(monkeypatch: pytest.MonkeyPatch) -> Iterator[Components]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "sample_plugin" / "src"))
    import falcon_lab_sample

    registrar = Registrar("falcon-lab-sample", "0.3.0")
    falcon_lab_sample.register_components(registrar)
    yield Components(registrar.components)
    for name in [name for name in sys.modules if name.startswith("falcon_lab_sample")]:
        del sys.modules[name]


def rows(target: Any, tokens: Tensor) -> DrafterInputs:
    """Packed rows of one document: the token one step ahead beside the target's feature."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    documents = torch.zeros_like(tokens)
    features = target.teacher(tokens, documents, positions)
    generator = torch.Generator().manual_seed(0)
    return DrafterInputs(
        tokens[:, 1:], features[:, :-1], documents[:, 1:], positions[:, 1:], generator
    )


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_decoding_with_the_samples_is_lossless(
    components: Components, width: int, depth: int
) -> None:
    target = tiny_target()
    drafter = components.build("drafter", {"name": "sample-mlp"}, BuildContext(target))
    context = BuildContext(target, drafter.block)
    node = {"name": "sample-rake", "width": width, "depth": depth}
    engine = SpeculativeEngine(
        target,
        drafter,
        components.build("tree_builder", node, context),
        Auto(None, context),
        Fixed(FixedConfig(), context),
    )
    prompts = [torch.tensor(prompt) for prompt in ([5], [7, 9, 11, 3], [20, 21])]
    stop = StopCondition(target.eos_ids)
    result = greedy_equality(PlainEngine(target), engine, prompts, max_new_tokens=12, stop=stop)
    assert result.passed, result.verdict


def test_the_drafter_learns_and_drafts_as_it_was_trained(components: Components) -> None:
    torch.manual_seed(0)
    target = tiny_target()
    drafter = components.build("drafter", {"name": "sample-mlp"}, BuildContext(target))
    assert isinstance(drafter, TrainableDrafter)
    assert is_trainable(drafter)
    inputs = rows(target, torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1)))
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
    target = tiny_target()
    schedule = components.build(
        "schedule", {"name": "sample-step", "ratio": 1.0, "until": 0.5}, BuildContext(target)
    )
    assert (schedule.ratio(0.2), schedule.ratio(0.5)) == (1.0, 0.0)
    wrong = torch.tensor([[True, True, False, True]])
    slot = torch.tensor([[0, 1, 0, 1]])
    glance = GlanceRows(wrong, torch.ones_like(wrong), slot, torch.tensor([[0, 0, 1, 1]]), 2)
    shown = schedule.reveal(glance, 1.0, torch.Generator().manual_seed(0))
    assert shown.tolist() == [[True, False, False, False]]
