"""Shapes: F frontier blocks, V vocabulary."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafter import SpsDrafter
from falcon_lab_sps.small_model import NEVER, fresh_config
from hypothesis import given, settings
from hypothesis import strategies as st
from sps_cases import FAMILIES, POSITIONS, ROOT, VOCAB, drafter, engine, target, tell, uncached

from falcon_lab import fields
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import BuildContext, Frontier
from falcon_lab.model.target import Target
from falcon_lab.testing import TREES, accepted, fit, lossless_rounds, write, write_together
from falcon_lab.testing.targets import tiny_model, tiny_tokenizer

CLOSE = {"atol": 2e-5, "rtol": 1e-4}
TOKENS = st.integers(1, VOCAB - 1)


CHAIN, BRANCHED, DYNAMIC = TREES.values()


def saved(folder: Path, family: str = "llama", vocab: int = VOCAB, **shape: int) -> str:
    """Save a draft model, and return its folder."""
    tiny_model(family, seed=3, vocab=vocab, **shape).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return str(folder)


def loaded(folder: str, family: str = "llama") -> SpsDrafter:
    return drafter(family, stir=0, model=folder)


# --- the same numbers whichever way they are computed ----------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    prompt=st.lists(TOKENS, min_size=2, max_size=12),
    part=st.integers(1, 6),
    rounds=st.lists(
        st.tuples(st.lists(TOKENS, max_size=4), st.lists(TOKENS, min_size=1, max_size=4)),
        max_size=4,
    ),
)
def test_cached_equals_uncached_whatever_was_drafted_before(
    family: str, prompt: list[int], part: int, rounds: list[tuple[list[int], list[int]]]
) -> None:
    draft = drafter(family, layers=1)
    draft.reset(torch.tensor(prompt[0]))
    rest = prompt[1:]
    for start in range(0, len(rest), part):
        tell(draft, rest[start : start + part], remaining=max(0, len(rest) - start - part))
    text = list(prompt)
    for drafted, committed in [*rounds, ([], [])]:
        found = draft.draft(ROOT).logits
        assert found.shape == (1, 1, VOCAB)
        assert torch.allclose(found[0, 0], uncached(draft, text), **CLOSE)
        for place, token in enumerate(drafted):
            found = draft.draft(Frontier(torch.tensor([[token]]), torch.tensor([0]))).logits
            path = text + drafted[: place + 1]
            assert torch.allclose(found[0, 0], uncached(draft, path), **CLOSE)
        if committed:
            tell(draft, committed)
            text += committed


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    passes=st.lists(
        st.lists(st.tuples(st.integers(0, 9), TOKENS), min_size=1, max_size=4), max_size=4
    ),
)
def test_a_tree_equals_its_paths_one_by_one(
    family: str, passes: list[list[tuple[int, int]]]
) -> None:
    draft, text = drafter(family), [3, 1, 4, 1, 5]
    draft.reset(torch.tensor(text[0]))
    tell(draft, text[1:])
    draft.draft(ROOT)
    paths: list[list[int]] = [[]]
    for blocks in passes:
        parents = [parent % len(paths) for parent, _ in blocks]
        paths = [
            [*paths[parent], token] for parent, (_, token) in zip(parents, blocks, strict=True)
        ]
        tokens = torch.tensor([[token] for _, token in blocks])
        found = draft.draft(Frontier(tokens, torch.tensor(parents))).logits
        for logits, path in zip(found[:, 0], paths, strict=True):
            assert torch.allclose(logits, uncached(draft, text + path), **CLOSE)


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("falcon_lab_sps.drafting.PIECE", 4)
    draft, text = drafter("gemma3"), [1 + number % 11 for number in range(30)]
    draft.reset(torch.tensor(text[0]))
    tell(draft, text[1:])
    assert torch.allclose(draft.draft(ROOT).logits[0, 0], uncached(draft, text), **CLOSE)


# --- lossless --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tree"), [*product(FAMILIES, TREES)])
def test_greedy_output_is_the_targets_own(family: str, tree: str) -> None:
    taken = 0
    for seed in (1, 2):
        one = engine(family, drafter(family, seed), TREES[tree])
        taken += accepted(lossless_rounds(one, [[5], [2, 7, 3, 9]], 24))
    assert taken > 0


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
@pytest.mark.parametrize("shape", [CHAIN, BRANCHED], ids=["chain", "branched"])
def test_sampled_output_follows_the_targets_distribution(
    shape: dict[str, Any], proposal: str
) -> None:
    one = engine("llama", drafter("llama", layers=1), shape | {"proposal": proposal})
    settings = {"samples": 300, "temperature": 1.5, "top_k": 3}
    assert fit(one, [3, 1, 4], generator=torch.Generator().manual_seed(5), **settings) > 0.01


def test_a_row_of_a_batch_is_drafted_for_as_if_alone() -> None:
    one = engine("gemma3", drafter("gemma3"), BRANCHED)
    prompts = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8], [4, 4]]
    together = write_together(one, prompts, batch_size=3)
    alone = [write(one, prompt) for prompt in prompts]
    assert [(text.tokens, text.rounds) for text in together] == [
        (text.tokens, text.rounds) for text in alone
    ]


# --- a model that is there -------------------------------------------------------------------


def test_a_model_from_a_folder_says_what_hugging_face_says(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    draft, text = loaded(folder), [5, 3, 9, 2]
    draft.reset(torch.tensor(text[0]))
    tell(draft, text[1:])
    theirs = tiny_model("llama", seed=3, vocab=VOCAB)(torch.tensor([text])).logits[0, -1]
    assert torch.allclose(draft.draft(ROOT).logits[0, 0], theirs, **CLOSE)


def test_a_draft_model_may_be_of_another_family(tmp_path: Path) -> None:
    draft = loaded(saved(tmp_path, "gpt2"), "llama")
    lossless_rounds(engine("llama", draft, CHAIN), [[2, 7]], 30)


def test_the_target_as_its_own_draft_model_is_always_right(tmp_path: Path) -> None:
    target("llama").model.save_pretrained(tmp_path)
    tiny_tokenizer(VOCAB).save_pretrained(tmp_path)
    for tree in (CHAIN, BRANCHED):
        rounds = lossless_rounds(engine("llama", loaded(str(tmp_path)), tree), [[2, 7, 1]], 40)
        assert {done.accepted == done.depth for done in rounds} == {True}


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = tmp_path / "tokenizer.json"
    words = json.loads(path.read_text())
    ids = words["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(words))
    with pytest.raises(FalconLabError, match=rf"another vocabulary .* 'a' is {ids['a']} and"):
        loaded(folder)


@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 4])
def test_tables_may_be_larger_or_smaller_than_the_targets(tmp_path: Path, rows: int) -> None:
    wide = tiny_model("llama", seed=4, vocab=VOCAB + 2)  # two entries that no tokenizer writes
    host = Target(wide, tiny_tokenizer(VOCAB), name="wide")
    folder = saved(tmp_path, vocab=rows)
    draft = SpsDrafter(SpsConfig(model=folder), BuildContext(host)).eval()
    draft.reset(torch.tensor(VOCAB + 1))  # which a smaller table does not have
    tell(draft, [3, 2])
    logits = draft.draft(ROOT).logits[0, 0]
    assert logits.shape == (VOCAB + 2,)
    assert bool((logits[VOCAB:] == NEVER).all()) == (rows == VOCAB)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match=r"draft model .*nowhere"):
        loaded(str(tmp_path / "nowhere"))


# --- limits ----------------------------------------------------------------------------------


def test_beyond_the_draft_models_positions_nothing_is_drafted(tmp_path: Path) -> None:
    draft = loaded(saved(tmp_path, "gpt2", positions=24), "gpt2")
    rounds = lossless_rounds(engine("gpt2", draft, CHAIN), [[2, 7, 1]], 60)
    assert rounds[0].depth == 5
    assert {done.depth for done in rounds[-20:]} == {0}


@pytest.mark.parametrize("new", [POSITIONS, 30])
def test_a_text_may_fill_the_targets_context(new: int) -> None:
    lossless_rounds(engine("gpt2", drafter("gpt2"), BRANCHED), [[2, 7, 1]], new)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_that_is_counted_is_the_memory_that_is_taken(family: str) -> None:
    draft = drafter(family)
    one = engine(family, draft, DYNAMIC)
    counted = draft.kv_bytes(40, one.tree_builder)
    write(one, [5, 2], 38)
    cache = draft._drafting._cache
    assert cache is not None
    assert cache.nbytes == counted


# --- configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_model_has_the_shape_that_was_asked_for(family: str) -> None:
    made = fresh_config(SpsConfig(layers=3, hidden=16, heads=2, intermediate=20), target(family))
    assert (made.num_hidden_layers, made.hidden_size, made.num_attention_heads) == (3, 16, 2)
    assert made.n_inner == 20 if family == "gpt2" else made.intermediate_size == 20
    proportional = fresh_config(SpsConfig(hidden=16), target("llama"))
    assert (proportional.intermediate_size, proportional.num_hidden_layers) == (32, 2)


def test_tied_weights_are_held_once() -> None:
    names = drafter("gpt2").state_dict().keys()
    assert not any("head" in name for name in names)
    assert any("head" in name for name in drafter("llama").state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "x", "layers": 2}, "leave out layers"),
        ({"revision": "main"}, "name the model"),
        ({"hidden": 0}, "drafter.hidden: is 0; it must be at least 1"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fields.options(SpsConfig, options, "drafter")


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(FalconLabError, match="4 heads do not divide"):
        drafter(hidden=30)
