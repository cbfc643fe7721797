"""Unrolled training passes are the later passes of drafting."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_cases import drafter, inputs
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.relaxed_mask import find_documents
from falcon_lab.interfaces import DrafterInputs, Frontier, Observation, Prediction
from falcon_lab.model import partial
from falcon_lab.model.lean import WHOLE

PASSES = 3
LENGTHS = (13, 9)  # of the documents
SWITCHES = [
    {"block": block, "fuse": fuse, "query": query}
    for block, fuse, query in product((1, 2, 3), ("lstm", "linear"), ("block", "newest", "mapped"))
]
MORE = [
    {"block": 2, "fuse": "lstm_positionwise"},
    {"block": 3, "phase": "absolute"},
    {"block": 2, "layers": 2},
    {"block": 2, "lstm_layers": 3, "query": "newest", "layers": 2},
]


def unrolled(made: FalconDrafter, given: DrafterInputs, *phases: int) -> list[Prediction]:
    phase = torch.tensor(phases)[given.documents]
    return list(islice(made.unroll(given, phase=phase), PASSES))


def drafted(made: FalconDrafter, tokens: Tensor, features: Tensor, newest: int) -> Iterator[Tensor]:
    """``[k, H]`` of every pass after reading rows up to ``newest``, drafting the true tokens."""
    seen = newest + 1
    made.reset(tokens[0])
    made.observe(Observation(tokens[:seen], features[:seen]))
    frontier = Frontier.root(tokens.device)
    while seen + made.block <= len(tokens) + made.block:
        output = made.draft(frontier)
        assert output.features is not None
        yield output.features[0]
        following = tokens[seen : seen + made.block]
        if len(following) < made.block:
            return
        frontier = Frontier(following[None], torch.zeros(1, dtype=torch.long))
        seen += made.block


def rows_of(prediction: Prediction, newest: int) -> tuple[Tensor, Tensor]:
    """Labels ``[k]`` and features ``[k, H]`` of the block whose newest row this is, by slot."""
    assert prediction.features is not None
    here = (prediction.source[0] == newest) & (prediction.label[0] >= 0)
    order = prediction.slot[0, here].argsort()
    return prediction.label[0, here][order], prediction.features[0, here][order]


@pytest.mark.parametrize("options", SWITCHES + MORE)
def test_a_pass_predicts_what_drafting_predicts_in_that_pass(options: dict[str, Any]) -> None:
    made, given = drafter(**options), inputs(*LENGTHS)
    block, compared = made.block, 0
    aligned = range(block) if options.get("phase") != "absolute" else range(1)
    for phase in aligned:
        passes = unrolled(made, given, phase, 0)
        for first, length, of in ((0, LENGTHS[0], phase), (LENGTHS[0], LENGTHS[1], 0)):
            tokens = given.tokens[0, first : first + length]
            features = given.features[0, first : first + length]
            for newest in range(block - 1, length):
                if (newest + of) % block != block - 1:
                    continue
                found = drafted(made, tokens, features, newest)
                for number, (ours, theirs) in enumerate(zip(passes, found, strict=False)):
                    label, predicted = rows_of(ours, first + newest)
                    ahead = first + newest + 1 + number * block
                    assert label.tolist() == list(range(ahead, ahead + block))
                    torch.testing.assert_close(predicted, theirs, atol=1e-5, rtol=1e-5)
                    compared += 1
    assert compared >= 15


def test_it_fulfils_what_unrolling_asks_for() -> None:
    assert drafter(block=2).unrolls


@pytest.mark.parametrize("query", ["block", "newest"])
def test_the_first_pass_is_the_one_without_unrolling(query: str) -> None:
    made = drafter(block=2, query=query, dropout=0.3).train()
    outputs = []
    for unroll in (False, True):
        given = inputs(*LENGTHS, generator=3)
        torch.manual_seed(5)
        outputs.append(next(made.unroll(given)) if unroll else made(given))
    assert outputs[0].features is not None
    for ours, theirs in zip(*(vars_of(output) for output in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def vars_of(prediction: Prediction) -> list[Tensor]:
    assert prediction.features is not None
    parts = prediction.label, prediction.source, prediction.slot, prediction.group
    return [prediction.features, *parts]


@pytest.mark.parametrize("options", [{"fuse": "lstm"}, {"fuse": "linear", "query": "newest"}])
def test_gradients_flow_through_all_passes_into_the_first_input(options: dict[str, Any]) -> None:
    made, given = drafter(block=2, **options), inputs(*LENGTHS)
    given.features.requires_grad_()
    last = unrolled(made, given, 0, 0)[-1]
    label, features = rows_of(last, 5)
    assert label.tolist() == [10, 11]
    features.sum().backward()
    assert given.features.grad is not None
    touched = given.features.grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [row <= 5 for row in range(sum(LENGTHS))]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())


READING = list(product((1, 2), ("newest", "mapped")))


def gradients_of(made: FalconDrafter, passes: list[Prediction]) -> dict[str, Tensor]:
    made.zero_grad()
    torch.stack(
        [p.features.square().sum() for p in passes if p.features is not None]
    ).sum().backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("layers", "query"), READING)
def test_what_is_not_read_of_contexts_changes_nothing(
    layers: int, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where queries predict, contexts are read by their keys and values."""
    made, given = drafter(block=2, layers=layers, query=query), inputs(*LENGTHS)
    ours = unrolled(made, given, 1, 0)
    mine = gradients_of(made, ours)
    monkeypatch.setattr(HeadLayers, "contexts_attend", True)
    monkeypatch.setattr(HeadLayers, "_reading", lambda *_: WHOLE)
    whole = unrolled(made, given, 1, 0)
    for one, other in zip(ours, whole, strict=True):
        assert one.features is not None
        assert other.features is not None
        torch.testing.assert_close(one.features, other.features, atol=1e-10, rtol=1e-10)
    theirs = gradients_of(made, whole)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize(("layers", "query"), READING)
def test_contexts_do_not_go_through_the_last_layers_network(layers: int, query: str) -> None:
    made, given = drafter(block=2, layers=layers, query=query), inputs(*LENGTHS)
    seen = list[list[int]]()
    for layer in made.backbone.decoder_layers:
        rows = list[int]()
        seen.append(rows)
        layer.mlp.register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0].flatten(0, -2).shape[0])
        )
    passes = unrolled(made, given, 0, 0)
    queries = [p.label.numel() for p in passes]
    assert seen[-1] == queries
    contexts = [sum(LENGTHS), *queries[1:]]
    both = [a + b for a, b in zip(queries, contexts, strict=True)]
    assert seen[:-1] == [both] * (layers - 1)


def test_a_pass_of_which_all_is_read_is_a_whole_one() -> None:
    made, given = drafter(block=2, query="block"), inputs(*LENGTHS)
    assert len(unrolled(made, given, 0, 0)) == PASSES
    assert made._part is None


def test_all_go_through_a_network_of_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = drafter(block=2, query="newest"), inputs(*LENGTHS)
    expected = [prediction.features for prediction in unrolled(made, given, 0, 0)]
    monkeypatch.setattr(partial, "NETWORKS", ("other",))
    strange = drafter(block=2, query="newest")
    strange.load_state_dict(made.state_dict())
    found = [prediction.features for prediction in unrolled(strange, given, 0, 0)]
    assert strange._part is not None
    assert strange._part[0] is WHOLE
    torch.testing.assert_close(found, expected)


def test_a_block_that_is_not_whole_begins_no_branch() -> None:
    given = inputs(*LENGTHS)
    made = drafter(block=3)
    first, second, _ = unrolled(made, given, 1, 2)
    assert 1 in first.source[0].tolist()  # rows 0 and 1 are what is there of the first block
    assert set(second.source[0, second.label[0] >= 0].tolist()) == {4, 7, 10, 16, 19}


def test_its_cells_are_those_of_the_kernels() -> None:
    made, given = drafter(block=2), inputs(7)
    rows = made.join(given.tokens, given.features)
    fused, state = made.fuse.packed_with_states(rows, find_documents(given.documents))
    assert state is not None
    torch.testing.assert_close(fused, made.fuse.packed(rows, find_documents(given.documents)))
    for stop in range(1, 8):
        _, expected = made.fuse(rows[:, :stop])
        assert expected is not None
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours[:, :, stop - 1], theirs, atol=1e-12, rtol=1e-9)
