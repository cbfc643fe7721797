from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from falcon_lab_lookup import LookupConfig
from falcon_lab_lookup.drafter import LookupDrafter
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from falcon_lab import fields
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import BuildContext, Drafter, Frontier, Observation

VOCABULARY = 12
ROOT = Frontier.root(torch.device("cpu"))


def drafter(tokens: list[int], **options: int) -> LookupDrafter:
    host: Any = SimpleNamespace(vocab_size=VOCABULARY)
    made = LookupDrafter(LookupConfig(**options), BuildContext(host))
    made.reset(torch.tensor(tokens[0]))
    made.observe(Observation(torch.tensor(tokens[1:], dtype=torch.long), None))
    return made


def proposed(made: LookupDrafter, frontier: Frontier = ROOT) -> list[int]:
    """Return the proposed tokens, one a position."""
    logits = made.draft(frontier).logits
    assert logits.isfinite().sum(-1).eq(1).all()
    return [int(token) for token in logits[0].argmax(-1)]


def by_scanning(tokens: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """The method as it was first described, read literally: what is copied is there as a whole."""
    for length in range(max_ngram, 0, -1):
        for start in range(len(tokens) - length):
            behind = start + length
            fits = behind + num_tokens <= len(tokens)
            if len(tokens) >= length and tokens[start:behind] == tokens[-length:] and fits:
                return tokens[behind : behind + num_tokens]
    return []


def hugging_faces(tokens: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """What assisted generation would verify."""
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([VOCABULARY]),  # which no text has: it would cut a candidate
        num_output_tokens=num_tokens,
        max_matching_ngram_size=max_ngram,
        max_length=10**6,
    )
    text = torch.tensor([tokens])
    found: list[int] = generator.get_candidates(text, is_first_iteration=False)[0][0].tolist()
    return found[len(tokens) :]


def test_it_copies_what_followed_the_longest_run() -> None:
    made = drafter([1, 2, 3, 4, 5, 3, 7, 8, 2, 3], max_ngram=3, num_tokens=2)
    assert proposed(made) == [4, 5]


def test_the_first_of_several_occurrences_counts() -> None:
    assert proposed(drafter([1, 2, 1, 3, 1], max_ngram=1, num_tokens=1)) == [2]


def test_a_match_with_too_little_text_behind_it_is_copied_as_far_as_it_goes() -> None:
    made = drafter([3, 9, 9, 9, 2, 3, 5, 2, 3], max_ngram=2, num_tokens=4)
    assert proposed(made) == [5, 2, 3]


def test_or_gives_way_to_a_shorter_run() -> None:
    made = drafter([3, 9, 9, 9, 2, 3, 5, 2, 3], max_ngram=2, num_tokens=4, whole=True)
    assert proposed(made) == [9, 9, 9, 2]


def test_what_it_copies_is_a_path_too() -> None:
    assert drafter([1, 2, 1], max_ngram=1, num_tokens=4).draft(ROOT).paths == [[2, 1]]
    assert drafter([1, 2, 3], num_tokens=2).draft(ROOT).paths == []


def test_without_a_match_there_are_no_rows() -> None:
    assert drafter([1, 2, 3], num_tokens=2).draft(ROOT).logits.shape == (1, 0, VOCABULARY)


def test_below_its_block_it_has_nothing_to_say() -> None:
    made = drafter([1, 2, 1, 2, 1], max_ngram=1, num_tokens=2)
    below = Frontier(torch.tensor([[2, 1]]), torch.tensor([0]))
    assert made.draft(below).logits.shape == (1, 0, VOCABULARY)


def test_a_new_sequence_forgets_the_old_one() -> None:
    made = drafter([1, 2, 1, 2, 1], max_ngram=1, num_tokens=1)
    made.reset(torch.tensor(1))
    assert proposed(made) == []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_ngram=st.integers(1, 4),
    num_tokens=st.integers(1, 6),
)
def test_it_equals_hugging_faces_candidate_by_candidate(
    tokens: list[int], max_ngram: int, num_tokens: int
) -> None:
    made = drafter(tokens[:1], max_ngram=max_ngram, num_tokens=num_tokens)
    for known in range(1, len(tokens) + 1):
        assert proposed(made) == hugging_faces(tokens[:known], max_ngram, num_tokens)
        made.observe(Observation(torch.tensor(tokens[known : known + 1], dtype=torch.long), None))


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_ngram=st.integers(1, 4),
    num_tokens=st.integers(1, 6),
)
def test_whole_copies_equal_a_literal_scan(
    tokens: list[int], max_ngram: int, num_tokens: int
) -> None:
    made = drafter(tokens, max_ngram=max_ngram, num_tokens=num_tokens, whole=True)
    assert proposed(made) == by_scanning(tokens, max_ngram, num_tokens)


def test_it_is_a_drafter_that_needs_no_features() -> None:
    made = drafter([1], num_tokens=7)
    assert isinstance(made, Drafter)
    assert made.block == 7
    assert made.needs == frozenset()


@pytest.mark.parametrize("key", ["max_ngram", "num_tokens"])
def test_an_option_below_one_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"drafter.{key}: is 0; it must be at least 1"):
        fields.options(LookupConfig, {key: 0}, "drafter")
