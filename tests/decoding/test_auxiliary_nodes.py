"""Auxiliary nodes change nothing but what the target reads: neither text nor acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.auxiliary import WithAuxiliary
from fakes.batches import NEW, PROMPTS, one_by_one, same_rounds, together
from fakes.decoding import CONTEXT, chain, generate, plain, speculative
from fakes.drafters import OracleDrafter, RandomDrafter
from fakes.remembering import RememberingDrafter
from fakes.table_target import TableTarget
from fakes.trees import prefix_closed
from falcon_lab.acceptance import Auto
from falcon_lab.decoding.generation import Generation, Round
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Acceptance
from falcon_lab.report.tree_drawing import tree_record
from falcon_lab.tree import AuxiliaryNodes, Entrance, TokenTree, listed_tree
from falcon_lab.trees.paths import Path
from falcon_lab.trees.templates import named
from tiny_models import POSITIONS, tiny_target

FAMILIES = ["llama", "gpt2", "mistral"]
TARGETS = {family: tiny_target(family, vocab=12) for family in FAMILIES}
PROMPT = [3, 1, 4]


class Oracle(WithAuxiliary, OracleDrafter):
    """Drafts well."""


class Random(WithAuxiliary, RandomDrafter):
    """Drafts badly."""


class Memory(WithAuxiliary, RememberingDrafter):
    """Drafts in a batch."""


def rounds(out: Generation) -> list[Round]:
    """Rounds without the number of their auxiliary nodes."""
    return [Round(r.nodes, r.depth, r.passes, r.accepted, r.emitted) for r in out.rounds]


def a_tree() -> TokenTree:
    return listed_tree(torch.tensor(5), [6, 7, 8], [0, 0, 1], [0.0, 0.0, 0.0])


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    paths=prefix_closed(10),
    block=st.integers(1, 3),
    most=st.integers(1, 12),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 0.9]),
    proposal=st.sampled_from(["deterministic", "sampled"]),
    layer=st.sampled_from([0, 1]),
)
def test_a_tree_with_any_auxiliary_nodes_is_accepted_as_it_is_without(
    family: str,
    paths: list[Path],
    block: int,
    most: int,
    seed: int,
    temperature: float,
    proposal: str,
    layer: int,
) -> None:
    target = TARGETS[family]
    truth = PROMPT + plain(target, PROMPT, 20).tokens
    drafter = Oracle(12, block, truth, seed=seed).with_nodes(most, seed, layer=layer)
    without = OracleDrafter(12, block, truth, seed=seed)
    ours, theirs = (
        generate(
            speculative(target, each, paths, proposal=proposal),
            PROMPT,
            20,
            temperature=temperature,
        )
        for each in (drafter, without)
    )
    assert ours.tokens == theirs.tokens
    assert rounds(ours) == rounds(theirs)
    if not temperature:
        assert (*PROMPT, *ours.tokens) == tuple(truth)
    assert (
        sum(round_.auxiliary > 0 for round_ in ours.rounds)
        == len(drafter.observed)
        == drafter.rounds
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafter_observes_what_the_target_predicts_at_its_nodes(family: str) -> None:
    target = TARGETS[family]
    drafter = Random(12, 2).with_nodes(5)
    told: list[Any] = []
    out = generate(
        speculative(target, drafter, named("auto", 2)),
        PROMPT,
        16,
        on_round=lambda *round_: told.append(round_),
    )
    verified = [(tree, accepted) for *_, tree, accepted in told if tree and tree.auxiliary]
    assert [tree for tree, _ in verified] == [tree for tree, *_ in drafter.observed]
    for (tree, logits, acceptance), (_, accepted) in zip(drafter.observed, verified, strict=True):
        assert logits.shape == (tree.nodes, 12)
        assert torch.equal(acceptance.path, accepted.path)
        assert int(acceptance.path[-1]) <= tree.drafted
    assert {round_.auxiliary for round_ in out.rounds} - {0}


def test_a_node_attends_to_its_mask_and_no_draft_attends_to_it() -> None:
    target = TARGETS["llama"]
    cache = target.new_cache(20)
    target.prefill(torch.tensor(PROMPT), cache)
    drafter, tree = Random(12, 1).with_nodes(6, seed=4), a_tree()
    added = drafter.auxiliary_nodes(tree, 3)
    asked = tree.with_auxiliary(added)
    assert (asked.nodes, asked.drafted, asked.auxiliary) == (
        4 + len(added.tokens),
        3,
        asked.auxiliary,
    )
    assert (asked.max_depth, asked.reach) == (2, max(2, int(added.depth.max())))
    assert not asked.ancestors[:4, 4:].any()
    assert torch.equal(asked.ancestors[4:], added.mask)
    start = cache.length
    logits = target.verify(asked, cache).logits
    cache.truncate(start)
    assert torch.allclose(logits[:4], target.verify(tree, cache).logits, atol=1e-5)
    for part in ("tokens", "parents", "depth", "ancestors"):
        assert torch.equal(getattr(asked.drafts, part), getattr(tree, part))


@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_that_enter_at_a_layer_go_on_as_if_they_had_come_from_below(family: str) -> None:
    target = TARGETS[family].tapped([1])
    asked = a_tree().with_auxiliary(
        AuxiliaryNodes(
            torch.tensor([9, 2]),
            torch.tensor([1, 2]),
            torch.tensor([[1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1]]).bool(),
        )
    )
    alone = target.new_cache(20)
    target.prefill(torch.tensor(PROMPT), alone)
    expected = target.verify(asked, alone)
    states = expected.taps[4:, 0]
    entering = replace(asked, entrance=Entrance(1, lambda below: states))
    alone.truncate(len(PROMPT))
    found = target.verify(entering, alone)
    batch = target.new_batch_cache(3, 20)
    for place, prompt in enumerate((PROMPT, [5], PROMPT[1:])):
        cache = batch.open(place)
        target.prefill(torch.tensor(prompt), cache)
        batch.fill(place, len(prompt))
    other = a_tree()
    together = target.verify_batch([entering, other, other], batch).split([6, 4, 4])
    for ours in (found, together[0]):
        for part in ("logits", "features", "taps"):
            torch.testing.assert_close(
                getattr(ours, part), getattr(expected, part), rtol=1e-4, atol=1e-4
            )
    batch.begin()
    separate = target.verify_batch([other, other, other], batch).split([4, 4, 4])
    torch.testing.assert_close(together[1].logits, separate[1].logits, rtol=1e-4, atol=1e-4)


def test_other_taps_are_refused_where_nodes_enter_at_a_layer() -> None:
    target = TARGETS["llama"].tapped([0])
    added = AuxiliaryNodes(
        torch.tensor([9]), torch.tensor([1]), torch.ones(1, 5).bool(), Entrance(1, lambda s: s[:1])
    )
    cache = target.new_cache(20)
    target.prefill(torch.tensor(PROMPT), cache)
    with pytest.raises(FalconLabError, match="tapped"):
        target.verify(a_tree().with_auxiliary(added), cache)


def test_acceptance_rules_never_see_auxiliary_nodes() -> None:
    class Looking(Auto):
        """Sees to it, on the way that waits for the device."""

        def __call__(self, tree: TokenTree, logits: Any, *others: Any) -> Acceptance:
            assert tree.nodes == tree.drafted + 1 == logits.shape[0]
            return super().__call__(tree, logits, *others)

    target, drafter = TableTarget(12), Random(12, 2).with_nodes(6)
    rule = Looking(None, CONTEXT)
    out = generate(speculative(target, drafter, named("auto", 2), rule=rule), PROMPT, 30)
    assert out.tokens == plain(target, PROMPT, 30).tokens
    assert len(drafter.observed) > 5


@pytest.mark.parametrize("new", [POSITIONS, 40])
def test_the_cache_has_room_for_auxiliary_nodes_to_the_end_of_the_context(new: int) -> None:
    target = TARGETS["gpt2"]
    drafter = Random(12, 1).with_nodes(9)
    engine = speculative(target, drafter, chain(2))
    assert engine.max_nodes == 3 + 9
    prompt = [1 + at % 11 for at in range(POSITIONS - 60)]
    assert generate(engine, prompt, new).tokens == plain(target, prompt, new).tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_sequence_of_a_batch_has_nodes_of_its_own(temperature: float) -> None:
    target = tiny_target("mistral")
    texts = [[*prompt, *plain(target, prompt, NEW).tokens] for prompt in PROMPTS]
    engine = speculative(target, Memory(64, 2, texts).with_nodes(7), named("auto", 2))
    ours = together(engine, 3, temperature=temperature)
    alone = []
    for seed, prompt in enumerate(PROMPTS):
        other = speculative(target, Memory(64, 2, texts).with_nodes(7), named("auto", 2))
        [one] = one_by_one(other, [prompt], temperature=temperature) if not seed else [None]
        alone.append(one)
    assert [one.tokens for one in ours] == [
        one.tokens
        for one in one_by_one(
            speculative(target, RememberingDrafter(64, 2, texts), named("auto", 2)),
            temperature=temperature,
        )
    ]
    assert any(round_.auxiliary for one in ours for round_ in one.rounds)
    same_rounds(ours[:1], alone[:1])


def test_more_nodes_than_were_announced_are_refused() -> None:
    class Greedy(Random):
        """Has more than it says."""

        def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> Any:
            self.max_auxiliary = 9
            found = super().auxiliary_nodes(tree, max_depth)
            self.max_auxiliary = 1
            return found

    drafter = Greedy(12, 1).with_nodes(1, seed=3)
    with pytest.raises(FalconLabError, match="max_auxiliary must be the most"):
        generate(speculative(TARGETS["llama"], drafter, chain(2)), PROMPT, 30)


def test_a_drafter_has_none_unless_it_says_how_many() -> None:
    assert RandomDrafter(12, 1).max_auxiliary == 0
    assert Random(12, 1).with_nodes(4).max_auxiliary == 4


def test_drawings_leave_auxiliary_nodes_out() -> None:
    told: list[Any] = []
    engine = speculative(TARGETS["llama"], Random(12, 1).with_nodes(6), chain(3))
    generate(engine, PROMPT, 12, on_round=lambda *round_: told.append(round_))
    tree, accepted = next((t, a) for *_, t, a in told if t is not None and t.auxiliary)
    record = tree_record(tree, accepted, str)
    assert len(record["tokens"]) == len(record["parents"]) == len(record["texts"]) == 4
