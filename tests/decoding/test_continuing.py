from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from everything import everything
from falcon_lab import testing
from falcon_lab.decoding.continuing import ContinuedPasses
from falcon_lab.decoding.target_sequences import TargetSequences, target_sequences
from falcon_lab.drafters.self_drafting import SelfDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DraftTokens, LayerPlan
from falcon_lab.model.target import Target, TargetOutput
from falcon_lab.testing.compiling import Pretend
from falcon_lab.testing.decoding import PROMPTS
from falcon_lab.testing.targets import tiny_model, tiny_target, tiny_tokenizer
from falcon_lab.tree import TokenTree, listed_tree

V, LAYERS, LOWER = 12, 4, 2
TEXTS = [[5, 9, 3, 11, 7, 2, 8, 6, 4], [1, 2, 3, 4], [9, 8, 7, 6, 5, 4]]
ROOT = 10
TREE = {"name": "static", "template": {"": 3, "0": 2, "1": 2, "00": 2, "10": 1, "000": 1}}
DYNAMIC = {"name": "dynamic", "nodes": 8, "beam": 3, "width": 3, "depth": 4}
CHAIN = {"name": "chain", "depth": 4}


class Lower(SelfDrafter):
    """Drafts with what the first layers give, and leaves it to verification, or does not."""

    taps = (LOWER,)

    def __init__(self, host: Any, layers: int = LOWER, *, leaves: bool = True) -> None:
        super().__init__(host)
        self._layers = layers
        self.lower_layers = layers if leaves else 0

    @property
    def plan(self) -> LayerPlan:
        return LayerPlan(last=self._layers)


def a_target(family: str) -> Target:
    family, _, lean = family.partition(", ")
    model = tiny_model(family, vocab=V, layers=LAYERS)
    return Target(model, tiny_tokenizer(V), name=family, lean=bool(lean)).tapped([LOWER])


def read(target: Target, texts: Sequence[Sequence[int]]) -> TargetSequences:
    sequences = target_sequences(target, len(texts), 40)
    for place, text in enumerate(texts):
        cache = sequences.open(place)
        target.prefill(torch.tensor(text), cache)
        sequences.fill(place, cache)
    return sequences


def path_of(*tokens: int) -> TokenTree:
    count = len(tokens)
    return listed_tree(torch.tensor(ROOT), tokens, range(count), [0.0] * count)


def a_tree() -> TokenTree:
    return listed_tree(torch.tensor(ROOT), [1, 2, 3, 4, 5], [0, 0, 2, 1, 3], [0.0] * 5)


def tokens(given: Sequence[int], depth: int, mask: Sequence[Sequence[int]] | None) -> DraftTokens:
    own = torch.tensor(given)
    seen = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    return DraftTokens(own, torch.full_like(own, depth), seen)


IN_A_CHAIN = [tokens([ROOT], 0, None), tokens([1], 1, None), tokens([2], 2, None)]
ELSEWHERE = [  # the second of the root's children first, and another one that is in no tree
    tokens([ROOT], 0, None),
    tokens([2, 7, 1], 1, [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]),
    tokens([8, 3], 2, [[1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 1]]),
]


def continued(
    target: Target, sequences: TargetSequences, drafts: Sequence[dict[int, DraftTokens]]
) -> ContinuedPasses:
    passes = ContinuedPasses(target, sequences, Lower(target))
    for one in drafts:
        passes.run(one, LayerPlan(last=LOWER))
    return passes


def assert_close(found: Sequence[TargetOutput], expected: Sequence[TargetOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(
            (ours.logits, ours.features, ours.taps),
            (theirs.logits, theirs.features, theirs.taps),
            strict=True,
        ):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def states_of(sequences: Any, place: int, stop: int) -> list[Tensor]:
    cache = sequences._cache
    return [pool[place, :, :stop] for side in cache.tensors() for pool in side]


@pytest.fixture(params=["llama", "gpt2", "gemma3", "mistral", "llama, lean", "mistral, lean"])
def target(request: pytest.FixtureRequest) -> Target:
    return a_target(request.param)


@pytest.mark.parametrize(
    ("drafts", "tree"),
    [
        (IN_A_CHAIN, path_of(1, 2)),
        (IN_A_CHAIN, path_of(1, 2, 3)),
        (IN_A_CHAIN, path_of(1)),
        (IN_A_CHAIN, a_tree()),
        (ELSEWHERE, a_tree()),
        (ELSEWHERE, path_of(1, 8, 4)),
        (ELSEWHERE, path_of(6, 3)),
    ],
)
def test_outputs_keys_and_values_are_those_of_the_whole_pass(
    target: Target, drafts: list[DraftTokens], tree: TokenTree
) -> None:
    whole, parted = read(target, TEXTS[:1]), read(target, TEXTS[:1])
    passes = continued(target, parted, [{0: one} for one in drafts])
    assert_close(passes.verify([tree]), whole.verify([tree]))
    stop = len(TEXTS[0]) + tree.nodes
    for ours, theirs in zip(states_of(parted, 0, stop), states_of(whole, 0, stop), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_so_they_are_of_several_sequences_with_other_trees(target: Target) -> None:
    trees = [a_tree(), path_of(1, 8), path_of()]
    whole, parted = read(target, TEXTS), read(target, TEXTS)
    drafts = [
        {0: ELSEWHERE[0], 1: IN_A_CHAIN[0]},
        {0: ELSEWHERE[1], 1: IN_A_CHAIN[1]},
        {0: ELSEWHERE[2]},
    ]
    passes = continued(target, parted, drafts)
    assert_close(passes.verify(trees), whole.verify(trees))
    for place, (text, tree) in enumerate(zip(TEXTS, trees, strict=True)):
        stop = len(text) + tree.nodes
        for ours, theirs in zip(
            states_of(parted, place, stop), states_of(whole, place, stop), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_went_another_way_through_the_layers_is_read_again() -> None:
    target = a_target("llama")
    whole, parted = read(target, TEXTS[:1]), read(target, TEXTS[:1])
    passes = ContinuedPasses(target, parted, Lower(target))
    passes.run({0: IN_A_CHAIN[0]}, LayerPlan(last=LOWER))
    passes.run({0: IN_A_CHAIN[1]}, LayerPlan(last=LOWER, skip_mlp=frozenset({0})))
    assert_close(passes.verify([path_of(1, 2)]), whole.verify([path_of(1, 2)]))


@pytest.mark.parametrize("last", [1, 3])
def test_passes_to_different_layers_are_kept_apart(target: Target, last: int) -> None:
    whole, parted = read(target, TEXTS[:1]), read(target, TEXTS[:1])
    passes = ContinuedPasses(target, parted, Lower(target))
    passes.run({0: IN_A_CHAIN[0]}, LayerPlan(last=last))
    assert_close(passes.verify([a_tree()]), whole.verify([a_tree()]))
    stop = len(TEXTS[0]) + a_tree().nodes
    for ours, theirs in zip(states_of(parted, 0, stop), states_of(whole, 0, stop), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_without_keys_in_a_layer_are_not_attended_to_there(count: int) -> None:
    target = a_target("llama")
    sequences = read(target, TEXTS[:count])
    again = tokens([ROOT], 0, [[0, 1]])
    whole = read(target, TEXTS[:count]).run({0: IN_A_CHAIN[0]}, LayerPlan(last=3))[0]
    sequences.run({0: IN_A_CHAIN[0]}, LayerPlan(last=1))
    for refused in (IN_A_CHAIN[1], tokens([1], 1, [[1, 1]])):
        with pytest.raises(FalconLabError, match="attend in layer 1 to others"):
            sequences.run({0: refused}, LayerPlan(last=3))
    torch.testing.assert_close(sequences.run({0: again}, LayerPlan(last=3))[0], whole)
    sequences.run({0: tokens([1], 1, [[1, 1, 1]])}, LayerPlan(last=1))  # fewer layers are there


def test_a_node_may_be_there_twice() -> None:
    target = a_target("llama")
    tree = listed_tree(torch.tensor(ROOT), [1, 1, 2, 3], [0, 0, 2, 1], [0.0] * 4)
    whole, parted = read(target, TEXTS[:1]), read(target, TEXTS[:1])
    passes = continued(target, parted, [{0: one} for one in IN_A_CHAIN])
    assert_close(passes.verify([tree]), whole.verify([tree]))


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count what the target runs from a layer on."""
    seen = []
    own = Target.run_part

    def run(self: Target, inputs: Tensor, new: Any, plan: LayerPlan) -> Tensor:
        seen.append(plan.first)
        return own(self, inputs, new, plan)

    monkeypatch.setattr(Target, "run_part", run)
    return lambda: sum(first > 0 for first in seen)


def engine_of(target: Target, drafter: SelfDrafter, tree: Any) -> Any:
    return testing.engine(target, drafter, tree=tree, components=everything())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
def test_rounds_are_the_same_with_and_without_it(family: str, lowered: Callable[[], int]) -> None:
    target = tiny_target(family, vocab=V, layers=LAYERS)
    for tree in (CHAIN, TREE, DYNAMIC):
        own, left = (Lower(target, leaves=one) for one in (False, True))
        expected = testing.write(engine_of(target, own, tree), PROMPTS[1], 12)
        before = lowered()
        rounds = testing.lossless_rounds(engine_of(target, left, tree), PROMPTS[1:2], 12)
        assert lowered() > before
        assert [one.accepted for one in rounds] == [one.accepted for one in expected.rounds]
    plain = [testing.plain_text(target, prompt, 12) for prompt in PROMPTS * 2]
    engine = engine_of(target, Lower(target), DYNAMIC)
    found = testing.write_together(engine, PROMPTS * 2, 12, batch_size=3)
    assert [one.tokens for one in found] == plain


def test_sampled_text_follows_the_targets_distribution() -> None:
    target = tiny_target(vocab=6, layers=LAYERS)
    engine = engine_of(target, Lower(target), {"name": "chain", "proposal": "sampled", "depth": 3})
    generator = torch.Generator().manual_seed(3)
    assert testing.fit(engine, [5, 3], samples=250, generator=generator, temperature=1.3) > 0.01


def test_compiled_passes_verify_the_same() -> None:
    target = tiny_target(vocab=V, layers=LAYERS)
    pretend = Pretend()
    texts = [
        testing.write(engine_of(each, Lower(each), DYNAMIC), PROMPTS[1], 24)
        for each in (target, target.compiled(lambda line: None, pretend))
    ]
    assert texts[0].tokens == texts[1].tokens
    assert [one.accepted for one in texts[0].rounds] == [one.accepted for one in texts[1].rounds]
    assert any(name.startswith("verify") for name in pretend.names)


def test_a_text_may_end_where_the_target_does() -> None:
    target = tiny_target(vocab=V, layers=LAYERS, positions=48)
    wide = {"name": "dynamic", "nodes": 6, "beam": 4, "width": 4, "depth": 6}
    testing.lossless_rounds(engine_of(target, Lower(target), wide), PROMPTS[1:2], 45)


def test_what_cannot_be_verified_so_is_refused() -> None:
    target = tiny_target(vocab=V, layers=LAYERS)
    auxiliary = Lower(target)
    auxiliary.max_auxiliary = 1
    for drafter, problem in (
        (Lower(target, 1), "tapped"),
        (Lower(target, LAYERS), "layers 4 to 3"),
        (auxiliary, "auxiliary nodes"),
    ):
        with pytest.raises(FalconLabError, match=problem):
            testing.write(engine_of(target, drafter, CHAIN), PROMPTS[1], 4)
