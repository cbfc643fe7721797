from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from everything import everything
from falcon_lab import testing
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.drafters.self_drafting import SelfDrafter
from falcon_lab.interfaces import Frontier, LayerPlan
from falcon_lab.model.target import Target
from falcon_lab.testing.compiling import Pretend
from falcon_lab.testing.decoding import PROMPTS
from falcon_lab.testing.targets import one_document, tiny_target
from falcon_lab.tree import TokenTree

V, LAYERS = 12, 4
TREE = {
    "name": "static",
    "template": {"": 3, "0": 2, "1": 2, "00": 2, "10": 1, "000": 1},
    "proposal": "deterministic",
}
DYNAMIC = {"name": "dynamic", "nodes": 8, "beam": 2, "width": 3, "depth": 4}
CHAIN = {"name": "chain", "depth": 4, "proposal": "deterministic"}
SKIPPING = LayerPlan(skip_attention=frozenset({1, 2}), skip_mlp=frozenset({2}))
GROUPED = LayerPlan(groups=((1, 2, 3),))


class Planned(SelfDrafter):
    def __init__(self, host: Any, plan: LayerPlan) -> None:
        super().__init__(host)
        self._plan = plan

    @property
    def plan(self) -> LayerPlan:
        return self._plan


def engine_of(target: Target, plan: LayerPlan, tree: Any = CHAIN, **more: Any) -> Any:
    drafter = Planned(target, plan)
    return testing.engine(target, drafter, tree=tree, components=everything(), **more)


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_whole_target_as_drafter_has_its_likeliest_path_accepted(
    family: str, tree: dict[str, Any]
) -> None:
    target = tiny_target(family, vocab=V, layers=LAYERS)
    engine = engine_of(target, LayerPlan(), tree)
    rounds = testing.lossless_rounds(engine, PROMPTS, 24)
    assert all(one.accepted == one.depth for one in rounds)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_whole_target_as_drafter_gives_its_own_probabilities_to_every_node(family: str) -> None:
    target = tiny_target(family, vocab=V, layers=LAYERS)
    engine = engine_of(target, LayerPlan(), DYNAMIC)
    text, checked = list(PROMPTS[1]), 0

    def check(added: list[int], accepted: int, tree: TokenTree | None, _: object) -> None:
        nonlocal checked
        for node in range(1, 0 if tree is None else tree.drafted + 1):
            path = tree.tokens[tree.ancestors[node]].tolist()
            assert path[0] == text[-1]
            batch = one_document(torch.tensor([*text, *path[1:-1]]))
            last = target.teacher(batch.tokens, batch.documents, batch.positions)[0, -1]
            expected = target.head(last).log_softmax(-1)[path[-1]]
            torch.testing.assert_close(tree.log_q[node], expected, rtol=1e-4, atol=1e-4)
            checked += 1
        text.extend(added)

    testing.write(engine, PROMPTS[1], 12, on_round=check)
    assert checked > 20


def test_several_sequences_are_drafted_for_in_one_pass_of_the_target() -> None:
    target = tiny_target("mistral", vocab=V, layers=LAYERS)
    plain = [testing.plain_text(target, prompt, 24) for prompt in PROMPTS * 2]
    for tree in (CHAIN, TREE):
        engine = engine_of(target, LayerPlan(), tree)
        found = testing.write_together(engine, PROMPTS * 2, 24, batch_size=3)
        assert [one.tokens for one in found] == plain
        assert all(done.accepted == done.depth for one in found for done in one.rounds)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
def test_drafting_through_some_layers_is_lossless(family: str) -> None:
    target = tiny_target(family, vocab=V, layers=LAYERS)
    for plan in (SKIPPING, GROUPED, LayerPlan.exit_after(2, LAYERS)):
        for tree in (CHAIN, TREE):
            engine = engine_of(target, plan, tree)
            rounds = testing.lossless_rounds(engine, PROMPTS, 24)
            assert sum(one.accepted for one in rounds) < sum(one.depth for one in rounds)
            testing.lossless_rounds(engine, PROMPTS[1:], 12, temperature=1.0)


def test_sampled_text_follows_the_targets_distribution() -> None:
    target = tiny_target(vocab=6, layers=LAYERS)
    engine = engine_of(target, SKIPPING, {"name": "chain", "proposal": "sampled", "depth": 3})
    generator = torch.Generator().manual_seed(3)
    assert testing.fit(engine, [5, 3], samples=400, generator=generator, temperature=1.3) > 0.01


def test_batches_of_different_lengths_are_lossless_through_some_layers() -> None:
    target = tiny_target(vocab=V, layers=LAYERS)
    plain = [testing.plain_text(target, prompt, 24) for prompt in PROMPTS * 2]
    for plan in (SKIPPING, GROUPED):
        engine = engine_of(target, plan, DYNAMIC)
        found = testing.write_together(engine, PROMPTS * 2, 24, batch_size=4)
        assert [one.tokens for one in found] == plain


@pytest.mark.parametrize("plan", [SKIPPING, GROUPED])
def test_compiled_passes_draft_the_same(plan: LayerPlan) -> None:
    target = tiny_target(vocab=V, layers=LAYERS)
    pretend = Pretend()
    fast = target.compiled(lambda line: None, pretend)
    texts = [testing.write(engine_of(each, plan, TREE), PROMPTS[1], 24) for each in (target, fast)]
    assert texts[0].tokens == texts[1].tokens
    assert [one.accepted for one in texts[0].rounds] == [one.accepted for one in texts[1].rounds]
    assert any("draft" in name for name in pretend.names)


def test_a_cache_has_room_for_what_drafting_appends() -> None:
    target = tiny_target(vocab=V, layers=LAYERS, positions=48)
    wide = {"name": "dynamic", "nodes": 6, "beam": 4, "width": 4, "depth": 6}
    engine = engine_of(target, LayerPlan(), wide)
    ours = testing.write(engine, PROMPTS[1], 45)
    assert ours.tokens == testing.write(PlainEngine(target), PROMPTS[1], 45).tokens


def test_a_copy_drafts_for_a_sequence_of_its_own() -> None:
    target = tiny_target(vocab=V, layers=LAYERS)
    drafter = Planned(target, SKIPPING)
    engine = testing.engine(target, drafter, components=everything())
    testing.write(engine, PROMPTS[1], 4)
    other = copy.deepcopy(drafter)
    assert other.host is drafter.host
    with pytest.raises(RuntimeError, match="attached"):
        other.draft(Frontier.root(torch.device("cpu")))
