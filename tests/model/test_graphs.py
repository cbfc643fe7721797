"""Passes replayed as graphs equal the plain ones; a recorder that runs things again stands in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.recording import Refusing, Repeating
from falcon_lab.decoding.plain import continue_texts
from falcon_lab.errors import FalconLabError
from falcon_lab.model.attention.choosing import use_backend
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.graphs import PADDING, Tail, floor_of, step_of
from falcon_lab.model.self_check import check_target
from graph_cases import ATOL, STEP, TREES, graphed, text, tree_of
from tiny_models import FAMILIES, tiny_target


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_are_the_plain_ones(family: str, lean: bool) -> None:
    target = tiny_target(family)
    target.backbone = Backbone(target.model.get_decoder(), lean=lean)
    recorder = Repeating()
    with_graphs = graphed(target, recorder)
    for prompt, seed in ((5, 0), (33, 1), (2, 2), (70, 3)):
        plain = text(target, prompt, seed)
        assert torch.allclose(text(with_graphs, prompt, seed), plain, atol=ATOL)
    assert recorder.replays == 32


@pytest.mark.parametrize("attention", ["eager", "torch_flash"])
def test_other_kernels_get_masks_that_they_can_take(attention: str) -> None:
    target = tiny_target("llama", attention="eager" if attention == "eager" else "sdpa")
    if attention != "eager":
        use_backend(target, attention, print)
    assert torch.allclose(text(graphed(target, Repeating()), 40), text(target, 40), atol=ATOL)


def test_a_target_with_graphs_passes_the_check_of_targets() -> None:
    check_target(tiny_target().compiled(print, recorder=Repeating()))


def test_texts_that_need_no_more_memory_take_none_and_capture_nothing() -> None:
    target, recorder = tiny_target(), Repeating()
    with_graphs = graphed(target, recorder)
    text(with_graphs, 40, seed=1)
    captured = recorder.captures
    [keys] = {tensor.data_ptr() for tensor in with_graphs.new_cache(1).tensors()[0][:1]}
    for prompt in (40, 12, 40):
        text(with_graphs, prompt, seed=2)
    assert with_graphs.new_cache(1).tensors()[0][0].data_ptr() == keys
    seen = {floor_of(length, STEP) for length in range(12, 40 + 8 * 6)}
    assert recorder.captures <= captured + len(TREES) * len(seen)
    again = recorder.captures
    text(with_graphs, 12, seed=3)
    assert recorder.captures == again


def test_memory_is_counted_exactly_and_grows_when_it_must() -> None:
    target = graphed(tiny_target(), Repeating())
    assert target.kv_allocated == 0
    for capacity in (10, 90, 200):
        expected = target.kv_bytes(capacity)
        cache = target.new_cache(capacity)
        assert cache.capacity >= capacity + PADDING
        target.prefill(torch.ones(1, dtype=torch.long), cache)
        assert cache.nbytes == expected == target.kv_allocated
    most = target.kv_allocated
    assert target.kv_bytes(10) == target.new_cache(10).nbytes == most


def test_rounding_up_costs_an_eighth_at_the_most() -> None:
    target = tiny_target().compiled(print, recorder=Repeating())
    position = target.kv_bytes(2000) // target.new_cache(2000).capacity
    for positions in range(2000, 40_000, 777):
        capacity = target.kv_bytes(positions) // position
        assert positions + PADDING <= capacity <= (positions + PADDING) * 9 / 8 + 1


def test_a_cache_is_of_no_use_once_the_next_one_was_asked_for() -> None:
    target = graphed(tiny_target(), Repeating())
    first, prompt = target.new_cache(20), torch.ones(4, dtype=torch.long)
    target.prefill(prompt, first)
    second = target.new_cache(20)
    target.prefill(prompt, second)
    with pytest.raises(FalconLabError, match="handed over to another sequence"):
        target.step(prompt[0], first)
    assert second.length == 4


def test_memory_of_several_texts_is_no_use_for_one() -> None:
    target, together = tiny_target(), [[3, 4], [5, 6, 7]]
    with_graphs = graphed(target, Repeating())
    several = [sorted(continue_texts(each, together, 12)) for each in (with_graphs, target)]
    assert len(several[0]) == 2
    assert several[0] == several[1]
    assert torch.allclose(text(with_graphs, 5), text(target, 5), atol=ATOL)


def test_outputs_stay_as_they_are() -> None:
    target = graphed(tiny_target(), Repeating())
    cache = target.new_cache(20)
    target.prefill(torch.tensor([3, 4, 5]), cache)
    first = target.step(torch.tensor(7), cache)
    before = first.logits.clone(), first.features.clone()
    target.step(torch.tensor(8), cache)
    assert torch.equal(first.logits, before[0])
    assert torch.equal(first.features, before[1])


@pytest.mark.parametrize("after", [0, 2])
def test_without_graphs_it_goes_on_and_says_why_once(after: int) -> None:
    target, recorder, said = tiny_target(), Refusing(after), list[str]()
    with_graphs = graphed(target, recorder, said)
    for prompt in (5, 20):
        assert torch.allclose(text(with_graphs, prompt), text(target, prompt), atol=ATOL)
    assert recorder.tried == after + 1
    assert said == [
        "target: no CUDA graphs, decoding continues without "
        "(operation not permitted when stream is capturing)"
    ]


def test_a_tree_larger_than_any_graph_is_read_plainly() -> None:
    target, recorder = tiny_target(), Repeating()
    with_graphs = graphed(target, recorder)
    many = tree_of([-1] + [0] * 299)
    for each in (target, with_graphs):
        each.max_positions = 1000
    out = []
    for each in (target, with_graphs):
        cache = each.new_cache(400)
        each.prefill(torch.tensor([3, 4, 5]), cache)
        out.append(each.verify(many, cache).logits)
    assert torch.allclose(*out, atol=ATOL)
    assert recorder.captures == 0


@given(
    start=st.integers(0, 60),
    new=st.integers(1, 6),
    older=st.integers(0, 9),
    more=st.integers(0, 4),
    wider=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_a_tail_says_who_sees_whom(
    start: int, new: int, older: int, more: int, wider: int, seed: int
) -> None:
    older = min(older, start)
    drawn = torch.Generator().manual_seed(seed)
    given_mask = torch.rand(new, older + new, generator=drawn) < 0.5
    size, columns = new + more, older + wider
    tail = Tail.empty(size, columns, torch.device("cpu"))
    tail.fill(torch.ones(size, columns + size, dtype=torch.bool), size, 3)  # what was there before
    tail.fill(given_mask, new, start)
    earlier = floor_of(max(0, start - columns), STEP)
    stop = earlier + step_of(earlier, STEP) + columns + size
    assert start + size <= stop
    seen = tail.seen(earlier, stop)
    whole = torch.zeros(size, stop, dtype=torch.bool)
    whole[:, : start - older] = True
    whole[:new, start - older : start + new] = given_mask
    assert torch.equal(seen[:new], whole[:new, earlier:])
    assert seen[new:].any(-1).all()  # padding sees something
    assert not seen[:new, start + new - earlier :].any()  # and nobody sees it


@given(st.integers(0, 100_000))
def test_the_next_graph_comes_before_the_tail_ends(keys: int) -> None:
    earlier = floor_of(keys)
    assert earlier <= keys < earlier + step_of(earlier)
    assert step_of(keys) <= max(256, keys / 32)
