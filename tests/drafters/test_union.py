from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from everything import everything
from falcon_lab import testing
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Frontier, Observation
from falcon_lab.testing.compiling import Pretend
from falcon_lab.testing.decoding import PROMPTS
from falcon_lab.testing.targets import tiny_target
from falcon_lab.tree import TokenTree
from falcon_lab.trees import union

V = 12
FALCON = {"name": "falcon", "block": 2}
LOOKUP = {"name": "lookup", "num_tokens": 4}
LOOKAHEAD = {"name": "lookahead", "ngram": 3, "window": 3, "guesses": 2}
DYNAMIC = {"name": "dynamic", "nodes": 8, "beam": 2, "width": 3}
PATHS = {"name": "paths", "nodes": 8}
DRAWN = {"name": "static", "template": {"": 2, "0": 2}, "proposal": "sampled"}
REPEATING = [2, 8, 2, 8, 2, 4, 11, 6, 2, 8]


def drafter(*parts: Mapping[str, Any], target: Any = None) -> Any:
    target = target or tiny_target(vocab=V)
    node = {"name": "union", "parts": [*parts]}
    return testing.build_drafter(target, node, components=everything(), stir=0.2)


def engine_of(
    parts: list[dict[str, Any]], trees: list[dict[str, Any]], family: str = "llama", **more: Any
) -> Any:
    target = tiny_target(family, vocab=V)
    tree = {"name": "union", "parts": trees, "nodes": 10}
    made = drafter(*parts, target=target)
    return testing.engine(target, made, tree=tree, components=everything(), **more)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_it_is_lossless_and_every_part_has_its_share(family: str) -> None:
    engine = engine_of([FALCON, LOOKAHEAD, LOOKUP], [DYNAMIC, PATHS, PATHS], family)
    rounds = testing.lossless_rounds(engine, PROMPTS, 40)
    assert testing.accepted(rounds) > 0
    assert any(one.auxiliary for one in rounds)
    testing.lossless_rounds(engine, PROMPTS[1:], 20, temperature=1.0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_drawn_and_looked_up_candidates_follow_the_targets_distribution(family: str) -> None:
    engine = engine_of([FALCON, LOOKUP, FALCON | {"block": 1}], [DRAWN, PATHS, DRAWN], family)
    seen: list[TokenTree] = []
    testing.write(engine, REPEATING, temperature=1.0, on_round=lambda *given: seen.append(given[2]))
    assert "mixed" in {tree.proposal for tree in seen if tree is not None}
    chance = testing.fit(
        engine,
        REPEATING,
        samples=150,
        generator=torch.Generator().manual_seed(5),
        temperature=2.0,
        top_k=3,
    )
    assert chance > 0.01


def test_a_wrong_parent_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made = union.merged_tree

    def misplaced(*given: Any) -> TokenTree:
        tree = made(*given)
        parents = tree.parents.clone()
        parents[tree.depth == 2] = tree.depth.eq(1).sum()  # the last of the root's children
        return replace(tree, parents=parents, routes=None)

    monkeypatch.setattr(union, "merged_tree", misplaced)
    engine = engine_of([FALCON, LOOKUP], [DYNAMIC, PATHS])
    prompts = [[start, *REPEATING] for start in range(1, V)]
    with pytest.raises(testing.ContractError, match="the target's own text"):
        testing.lossless_rounds(engine, prompts, 60)


def test_every_part_drafts_as_if_it_were_alone() -> None:
    target = tiny_target(vocab=V)
    parts = [FALCON, LOOKUP]
    made = drafter(*parts, target=target)
    alone = drafter(*parts, target=target).drafters
    texts = torch.tensor([[3, 1, 4, 1, 5], [2, 8, 2, 8, 2]])
    for text in texts:
        features = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(1))
        for each in (made, *alone):
            each.reset(text[0])
            each.observe(Observation(text, features))
        root = Frontier.root(torch.device("cpu"))
        for asked in [(root, root), (None, root), (root, None)]:
            found = made.draft(replace(root, parts=asked)).parts
            for part, own, output in zip(alone, asked, found, strict=True):
                assert (output is None) == (own is None)
                if own is not None:
                    assert torch.equal(output.logits, part.draft(own).logits)


def test_a_part_is_shown_the_layers_that_it_taps_alone() -> None:
    seen: list[Observation] = []
    made = drafter({"name": "eagle3"}, LOOKUP)
    made.drafters[1].observe = seen.append
    taps = made.drafters[0].taps
    assert made.taps == taps
    assert made.needs == made.drafters[0].needs
    made.reset(torch.tensor(1))
    made.observe(Observation(torch.tensor([1]), torch.randn(1, 32), 0, torch.randn(1, 3, 32)))
    assert (seen[0].features, seen[0].taps) == (None, None)


@pytest.mark.parametrize("parts", [[FALCON, LOOKUP], [LOOKAHEAD, FALCON]])
def test_texts_of_a_batch_are_what_they_are_alone(parts: list[dict[str, Any]]) -> None:
    trees = [DYNAMIC if part is FALCON else PATHS for part in parts]
    engine = engine_of(parts, trees)
    prompts = [*PROMPTS, [4, 4, 4]]
    together = testing.write_together(engine, prompts, 24, batch_size=2)
    for prompt, ours in zip(prompts, together, strict=True):
        expected = testing.write(engine, prompt, 24)
        assert ours.tokens == expected.tokens
        assert ours.rounds == expected.rounds


def test_memory_is_that_of_all_parts_in_their_own_trees() -> None:
    engine = engine_of([FALCON, {"name": "sps"}], [DYNAMIC, {"name": "chain", "depth": 3}])
    own = zip(engine.drafter.drafters, engine.tree_builder.builders, strict=True)
    counted = [part.kv_bytes(50, tree) for part, tree in own]
    assert min(counted) > 0
    assert engine.drafter_bytes(50) == sum(counted)
    testing.write(engine, REPEATING)
    held = [part.kv_allocated for part in engine.drafter.drafters]
    assert engine.drafter_allocated == sum(held)


def test_its_parts_are_compiled() -> None:
    made, said = drafter(FALCON, LOOKUP), []
    assert not made.is_compiled
    compiled = made.compiled(said.append, Pretend())
    assert compiled.is_compiled
    assert not made.is_compiled
    assert compiled.drafters[0].is_compiled
    assert said == []


def test_too_few_parts_are_refused_and_so_is_one_tree_for_several() -> None:
    with pytest.raises(FalconLabError, match="1 parts; give it two or more"):
        drafter(FALCON)
    target = tiny_target(vocab=V)
    made = drafter(FALCON, LOOKUP, target=target)
    with pytest.raises(FalconLabError, match="tree for each of them"):
        testing.engine(target, made, tree={"name": "chain"}, components=everything())


def test_a_part_may_have_a_draft_vocabulary() -> None:
    parts = [FALCON | {"draft_vocabulary": 6}, LOOKUP]
    engine = engine_of(parts, [DYNAMIC, PATHS])
    testing.lossless_rounds(engine, PROMPTS)
    made, tokens = engine.drafter, torch.tensor([3, 1, 4, 1, 5])
    made.reset(tokens[0])
    made.observe(Observation(tokens, torch.randn(5, engine.target.hidden_size)))
    output = made.draft(Frontier.root(tokens.device))
    narrow, _ = output.parts
    assert narrow.logits.shape[-1] == 6
    assert output.vocabulary is None
    assert torch.equal(output.logits, narrow.target_logits)


def test_unions_may_be_nested() -> None:
    inner = {"name": "union", "parts": [FALCON, LOOKUP]}
    tree = {"name": "union", "parts": [DYNAMIC, PATHS], "nodes": 6}
    engine = engine_of([inner, LOOKAHEAD], [tree, PATHS])
    rounds = testing.lossless_rounds(engine, PROMPTS[1:], 30)
    assert testing.accepted(rounds) > 0
    assert PlainEngine(engine.target).lossless
