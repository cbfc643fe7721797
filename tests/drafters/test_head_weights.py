"""A head that begins as the least-squares solution of its task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, DrafterInputs
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig
from tiny_models import FAMILIES, tiny_target


def head_of(target: Target, **options: Any) -> FalconDrafter:
    torch.manual_seed(0)
    return FalconDrafter(FalconConfig(fuse="linear", **options), BuildContext(target)).eval()


def planted(
    target: Target, places: int, *, sequences: int = 30, length: int = 24
) -> list[tuple[DrafterInputs, Tensor]]:
    """Documents in which a feature is a normed linear map of what a head of one place reads."""
    generator = torch.Generator().manual_seed(1)
    width = target.hidden_size
    rule = torch.randn(2 * width, width, generator=generator) / width**0.5
    tokens = torch.randint(0, target.vocab_size, (sequences, length), generator=generator)
    documents = torch.zeros(sequences, length, dtype=torch.long)
    documents[:, length // 2 :] = 1
    documents += 2 * torch.arange(sequences)[:, None]
    norm = target.backbone.final_norm
    features = torch.randn(sequences, length, width, generator=generator)
    with torch.no_grad():
        # Each feature follows from the token and the feature ``places`` before it.
        for t in range(places, length):
            given = [target.embed(tokens[:, t - places + 1]), features[:, t - places]]
            before = torch.cat(given, -1) @ rule
            # What is regressed on has norm one, which the planted map shall have already.
            features[:, t] = norm(before)
    inputs = DrafterInputs(
        tokens=tokens[:, 1:],
        features=features[:, :-1],
        documents=documents[:, :-1],
        positions=torch.arange(length - 1).expand(sequences, -1),
        generator=torch.Generator(),
    )
    return [(inputs, features)]


def begin(head: FalconDrafter, samples: list[tuple[DrafterInputs, Tensor]]) -> int:
    """Set a head's first weights, and return the rows that they rest on."""
    solution = head.first_weights()
    for inputs, features in samples:
        solution.add(inputs, features)
    return solution.assign()


def agreement(head: FalconDrafter, inputs: DrafterInputs, features: Tensor) -> list[float]:
    """Return the cosine between what each place predicts and the feature there."""
    with torch.no_grad():
        found = head.predict(inputs, torch.zeros_like(inputs.tokens))
    assert found.features is not None
    documents = torch.cat([inputs.documents, inputs.documents[:, -1:]], 1)
    cosines = []
    for place in range(head.block):
        chosen = (found.slot == place) & (found.label >= 0) & (found.label < features.shape[1])
        label = found.label.clamp(0, features.shape[1] - 1)
        chosen &= documents.gather(1, label) == documents.gather(1, found.source)
        true = features.gather(1, label[..., None].expand(-1, -1, features.shape[-1]))
        cosine = torch.cosine_similarity(found.features.float(), true, dim=-1)
        cosines.append(float(cosine[chosen].mean()))
    return cosines


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_a_head_finds_a_planted_rule_without_training(family: str) -> None:
    target = tiny_target(family)
    samples = planted(target, 1)
    head = head_of(target, block=1)
    [before] = agreement(head, *samples[0])
    count = begin(head, samples)
    [after] = agreement(head, *samples[0])
    assert count == 30 * (23 - 1)  # a row has its outcome in the same document
    assert before < 0.5
    assert after > 0.93


@pytest.mark.parametrize("options", [{"block": 1}, {"block": 2, "query": "mapped"}])
def test_a_head_that_taps_layers_finds_what_only_they_tell(options: dict[str, Any]) -> None:
    target, (layers, length) = tiny_target(), (2, 24)
    [(inputs, features)] = planted(target, 1)
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(30, length - 1, layers, target.hidden_size, generator=generator)
    taps /= taps.square().mean(-1, keepdim=True).sqrt()
    # A feature follows from the lower layer and the token; the feature before it tells nothing.
    given = torch.cat([target.embed(inputs.tokens), taps[:, :, 0]], -1)
    rule = torch.randn(given.shape[-1], target.hidden_size, generator=generator)
    features = torch.cat([features[:, :1], target.backbone.final_norm(given @ rule)], 1).detach()
    inputs = replace(inputs, features=features[:, :-1], taps=taps)

    blind, head = head_of(target, **options), head_of(target, **options, taps=[0, 1])
    begin(blind, [(replace(inputs, taps=None), features)])
    begin(head, [(inputs, features)])
    assert agreement(head, inputs, features)[0] > 0.9
    assert agreement(blind, replace(inputs, taps=None), features)[0] < 0.8


def test_a_later_pass_reads_the_mixture_that_goes_with_a_predicted_feature() -> None:
    target = tiny_target()
    [(inputs, features)] = planted(target, 1)
    rule = torch.randn(target.hidden_size, target.hidden_size) / target.hidden_size**0.5
    states = inputs.features @ rule
    states /= states.square().mean(-1, keepdim=True).sqrt()
    head = head_of(target, block=1, taps=[1])
    begin(head, [(replace(inputs, taps=states[:, :, None]), features)])
    with torch.no_grad():
        mixture = head.read(inputs.features, states[:, :, None])
        expected = head.carried(inputs.features)
    assert torch.cosine_similarity(expected, mixture, dim=-1).mean() > 0.95


def test_blocks_that_add_positions_of_their_own_are_refused() -> None:
    target = tiny_target("gpt2")
    with pytest.raises(FalconLabError, match="begin as the identity"):
        begin(head_of(target, block=1), planted(target, 1))


def test_queries_learn_a_map_for_each_place() -> None:
    target = tiny_target()
    head = head_of(target, block=3, query="mapped")
    first = planted(target, 1)
    begin(head, first)
    cosines = agreement(head, *first[0])
    assert cosines[0] > 0.9
    assert cosines[0] > cosines[2]
    head = head_of(target, block=3, query="mapped")
    third = planted(target, 3)
    begin(head, third)
    assert agreement(head, *third[0])[2] > 0.9


def test_a_row_of_which_the_outcome_is_in_another_document_or_padding_does_not_count() -> None:
    target = tiny_target()
    samples = planted(target, 1, sequences=2, length=8)
    assert begin(head_of(target, block=1), samples) == 2 * 6
    mapped = head_of(target, block=3, query="mapped")
    assert begin(mapped, samples) == 2 * 2
    inputs, features = samples[0]
    padded = inputs.documents.where(inputs.documents != 3, -1)
    assert begin(head_of(target, block=1), [(replace(inputs, documents=padded), features)]) == 9


def test_without_a_row_the_weights_stay_as_they_were() -> None:
    target = tiny_target()
    head = head_of(target, block=3, query="mapped")
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    assert begin(head, planted(target, 1, sequences=2, length=4)) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())


def test_what_has_no_such_solution_is_refused_with_what_to_set() -> None:
    target = tiny_target()
    context = BuildContext(target)
    with pytest.raises(FalconLabError, match=r"drafter\.fuse=linear"):
        FalconDrafter(FalconConfig(), context).first_weights()
    with pytest.raises(FalconLabError, match=r"drafter\.query=mapped"):
        head_of(target, query="newest").first_weights()
    bare = head_of(target, block=1)
    bare.fuse.mix.bias = None
    with pytest.raises(FalconLabError, match="has no bias"):
        bare.first_weights()
