"""A row of a batch writes what it would write alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.batches import NEW, PROMPTS, one_by_one, same_rounds, same_texts, together
from fakes.decoding import CONTEXT, chain, speculative
from fakes.remembering import RememberingDrafter
from fakes.tokenizer import Pieces
from fakes.trees import prefix_closed
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.controllers import Confidence
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import ConfidenceConfig, DynamicTreeConfig, FalconConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.best_first import DynamicTree
from falcon_lab.trees.paths import Path
from falcon_lab.trees.templates import named
from tiny_models import FAMILIES, POSITIONS, tiny_model, tiny_target, tiny_tokenizer

ENDS = StopCondition({3, 17, 40})


@lru_cache
def target_of(family: str) -> Target:
    return tiny_target(family)


@lru_cache
def lean_target() -> Target:
    return Target(tiny_model("mistral"), tiny_tokenizer(), name="lean", lean=True)


@lru_cache
def alone(family: str) -> list[Generation]:
    return one_by_one(PlainEngine(target_of(family)))


@lru_cache
def falcon(family: str, block: int, **options: Any) -> FalconDrafter:
    torch.manual_seed(block)
    made = FalconDrafter(FalconConfig(block=block, **options), BuildContext(target_of(family)))
    return made.eval()


def remembering(family: str, block: int, seed: int = 0) -> RememberingDrafter:
    texts = [[*prompt, *one.tokens] for prompt, one in zip(PROMPTS, alone(family), strict=True)]
    return RememberingDrafter(64, block, texts, seed=seed)


def tree_of(name: str, block: int) -> Any:
    if name == "dynamic":
        shape = DynamicTreeConfig(nodes=7, depth=4, beam=3, width=3)
        return DynamicTree(shape, BuildContext(CONTEXT.host, block))
    return chain(5) if name == "chain" else named(name, block)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plain_batch_writes_what_each_prompt_gives_alone(family: str, rows: int) -> None:
    engine = PlainEngine(target_of(family))
    theirs = one_by_one(engine, stop=ENDS)
    assert len({len(one.tokens) for one in theirs}) > 1  # rows end at different times
    same_rounds(together(engine, rows, stop=ENDS), theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "block"), [(1, 2), (3, 3)])
def test_a_speculative_batch_writes_what_each_prompt_gives_alone(
    family: str, rows: int, block: int
) -> None:
    engine = speculative(target_of(family), remembering(family, block), named("auto", block))
    ours = together(engine, rows)
    same_rounds(ours, one_by_one(engine))
    same_texts(ours, alone(family))
    assert sum(round_.accepted for one in ours for round_ in one.rounds) > 8


@pytest.mark.parametrize("family", ["mistral", "gpt_neox"])
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("tree", ["chain", "auto", "dynamic"])
def test_falcon_drafts_for_a_batch_as_it_does_for_each_alone(
    family: str, block: int, tree: str
) -> None:
    engine = speculative(target_of(family), falcon(family, block), tree_of(tree, block))
    ours = together(engine, 3)
    same_rounds(ours, one_by_one(engine))
    same_texts(ours, alone(family))


@pytest.mark.parametrize("options", [{"query": "newest"}, {"phase": "absolute"}], ids=str)
def test_so_do_its_variants(options: dict[str, Any]) -> None:
    drafter = falcon("qwen3", 2, **options)
    engine = speculative(target_of("qwen3"), drafter, tree_of("auto", 2))
    same_rounds(together(engine, 3), one_by_one(engine))


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(1, 63), min_size=1, max_size=12), min_size=1, max_size=6),
    prefix_closed(12),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sets(st.integers(0, 63), max_size=8),
    st.sampled_from(["llama", "mistral"]),
)
def test_any_prompts_trees_lengths_and_ends(
    prompts: list[list[int]],
    paths: list[Path],
    block: int,
    rows: int,
    new: int,
    ends: set[int],
    family: str,
) -> None:
    plain, stop = PlainEngine(target_of(family)), StopCondition(ends)
    expected = one_by_one(plain, prompts, new, stop=stop)
    same_rounds(together(plain, rows, prompts, new, stop=stop), expected)
    texts = [[*prompt, *one.tokens] for prompt, one in zip(prompts, expected, strict=True)]
    engine = speculative(plain.target, RememberingDrafter(64, block, texts), paths)
    ours = together(engine, rows, prompts, new, stop=stop)
    same_texts(ours, expected)
    same_rounds(ours, one_by_one(engine, prompts, new, stop=stop))


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_prompts_seed_gives_its_text_whatever_stands_beside_it(rows: int) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95}
    plain = PlainEngine(target_of("llama"))
    expected = one_by_one(plain, **settings)
    same_texts(together(plain, rows, **settings), expected)
    engine = speculative(plain.target, falcon("llama", 2), tree_of("auto", 2))
    same_texts(together(engine, rows, **settings), expected)


@pytest.mark.parametrize("drafter", ["falcon", "remembering"])
@pytest.mark.parametrize("rows", [2, 8])
def test_sampled_drafts_too_are_the_rows_own(drafter: str, rows: int) -> None:
    made: Any = falcon("llama", 2) if drafter == "falcon" else remembering("llama", 2)
    engine = speculative(target_of("llama"), made, named("k2-8", 2), proposal="sampled")
    ours = together(engine, rows, temperature=1.0)
    same_rounds(ours, one_by_one(engine, temperature=1.0))
    assert ours != together(engine, rows, temperature=0.0)


def test_every_row_has_a_controller_of_its_own() -> None:
    controller = Confidence(ConfidenceConfig(threshold=0.05), CONTEXT)
    engine = speculative(target_of("llama"), falcon("llama", 1), chain(6), controller=controller)
    ours = together(engine, 3)
    same_rounds(ours, one_by_one(engine))
    assert len({round_.passes for one in ours for round_ in one.rounds}) > 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hugging_faces_modules_and_the_lean_layers_agree(attention: str) -> None:
    target = tiny_target("mistral", attention=attention)
    engine = speculative(target, remembering("mistral", 2), tree_of("auto", 2))
    lean = speculative(lean_target(), remembering("mistral", 2), tree_of("auto", 2))
    assert lean_target().backbone.lean is not None
    same_rounds(together(engine, 3), together(lean, 3))
    same_texts(together(engine, 3), alone("mistral"))


def test_a_stop_string_ends_one_row_and_not_its_neighbours() -> None:
    pieces = Pieces([chr(ord("a") + number % 26) for number in range(64)])
    stop = StopCondition((), ["k", "zz"], pieces)
    engine = speculative(target_of("llama"), remembering("llama", 2), tree_of("auto", 2))
    ours = together(engine, 3, stop=stop)
    same_texts(ours, one_by_one(PlainEngine(target_of("llama")), stop=stop))
    assert {"stop", "length"} == {one.finish for one in ours}


@pytest.mark.parametrize("new", [1, 2, 40])
def test_a_row_at_the_end_of_the_context_does_not_hinder_the_others(new: int) -> None:
    prompts = [[1 + i % 50 for i in range(POSITIONS - 9)], [5, 9, 3], [2] * (POSITIONS - 1)]
    plain = PlainEngine(target_of("gpt2"))
    engine = speculative(plain.target, falcon("gpt2", 2), tree_of("auto", 2))
    expected = one_by_one(plain, prompts, new)
    same_rounds(together(plain, 2, prompts, new), expected)
    same_texts(together(engine, 2, prompts, new), expected)
    assert expected[2].finish == ("length" if new == 1 else "context")


@pytest.mark.parametrize("chunk", [1, 4, 6])
def test_long_prompts_come_in_chunks(chunk: int) -> None:
    engine = speculative(target_of("mistral"), falcon("mistral", 3), tree_of("auto", 3))
    whole = together(engine, 2)
    engine.decoding = DecodingConfig(prefill_chunk=chunk)
    same_rounds(together(engine, 2), whole)


def test_a_round_is_one_pass_of_the_target_and_at_most_the_widest_rows_passes() -> None:
    target, drafter = tiny_target("llama"), falcon("llama", 2)
    calls = {"target": 0, "drafter": 0}

    def counting(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    target.backbone.register_forward_hook(counting("target"))
    hook = drafter.backbone.register_forward_hook(counting("drafter"))
    ours = together(speculative(target, drafter, chain(4)), len(PROMPTS))
    hook.remove()
    longest = max(len(one.rounds) for one in ours)
    assert calls["target"] == len(PROMPTS) + longest
    # Each prompt has a first pass of its own; then a round takes two passes, whoever takes part.
    assert calls["drafter"] <= len(PROMPTS) + 2 * longest


def test_texts_come_as_soon_as_they_end_and_add_up() -> None:
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    stream = PlainEngine(target_of("llama")).stream(
        prompts,
        batch_size=2,
        max_new_tokens=NEW,
        sampling=Sampling(),
        generators=[torch.Generator() for _ in prompts],
        stop=ENDS,
    )
    found = dict(stream)
    assert sorted(found) == list(range(len(prompts)))
    expected = one_by_one(PlainEngine(target_of("llama")), stop=ENDS)
    shortest = min(range(2), key=lambda number: len(expected[number].tokens))
    assert next(iter(found)) == shortest
    for one in found.values():
        assert one.seconds.prefill > 0
        parts = (one.seconds.verify, one.seconds.accept, one.seconds.overhead)
        assert one.seconds.total == pytest.approx(sum(parts))


def test_no_prompts_give_no_texts() -> None:
    assert together(PlainEngine(target_of("llama")), 3, []) == []


def test_a_wrong_prompt_is_refused_before_anything_is_written() -> None:
    stream = PlainEngine(target_of("llama")).stream(
        [torch.tensor([1]), torch.tensor([], dtype=torch.long)],
        batch_size=1,
        max_new_tokens=2,
        sampling=Sampling(),
        generators=[torch.Generator()] * 2,
        stop=StopCondition(),
    )
    with pytest.raises(FalconLabError, match="empty"):
        next(stream)


def test_a_batch_has_sequences() -> None:
    with pytest.raises(FalconLabError, match="at least one sequence"):
        together(PlainEngine(target_of("llama")), 0)


def test_the_memory_of_all_rows_is_counted_before_it_is_taken() -> None:
    engine = speculative(target_of("llama"), falcon("llama", 2), chain(4))
    one = engine.target.kv_bytes(25 + 5) + falcon("llama", 2).kv_bytes(25, engine.tree_builder)
    engine.decoding = DecodingConfig(kv_memory=(3 * one - 1) / 2**30)
    together(engine, 2)
    with pytest.raises(FalconLabError, match=r"3 sequences of 25 tokens .* at most 24 tokens fit"):
        together(engine, 3)
