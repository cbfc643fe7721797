from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.tokenizer import Pieces
from falcon_lab.decoding.stopping import StopCondition, Transcript, begin
from falcon_lab.errors import FalconLabError

PIECES = Pieces(["a", "b", "ab", "ba", "\n", "xyz", b"\xe2\x82", b"\xac", "<end>"])


def ended(stop: StopCondition, tokens: list[int], steps: list[int]) -> tuple[list[int], str | None]:
    """The transcript after ``tokens`` were added a few at a time."""
    transcript = Transcript(stop, 12, "length")
    while tokens:
        size = steps[len(transcript.tokens) % len(steps)]
        kept = transcript.extend(tokens[:size])
        assert kept == tokens[: len(kept)]
        tokens = tokens[size:]
    return transcript.tokens, transcript.finish


@given(
    st.lists(st.integers(0, 8), max_size=20),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.lists(st.sampled_from(["aa", "bab", "b\n", "€", "zx", "yzab"]), max_size=2),
)
def test_a_text_ends_in_one_place_however_many_tokens_are_added_at_once(
    tokens: list[int], steps: list[int], strings: list[str]
) -> None:
    stop = StopCondition({8}, strings, PIECES)
    assert ended(stop, tokens, steps) == ended(stop, tokens, [1])


def test_the_token_that_ends_the_text_is_kept_and_what_follows_is_not() -> None:
    stop = StopCondition({8}, ["bb"], PIECES)
    assert ended(stop, [0, 8, 0], [3]) == ([0, 8], "eos")
    assert ended(stop, [0, 2, 3, 0], [4]) == ([0, 2, 3], "stop")
    assert ended(stop, [0] * 14, [5]) == ([0] * 12, "length")
    assert ended(stop, [0, 1, 0], [3]) == ([0, 1, 0], None)


def test_a_stop_string_may_begin_and_end_inside_tokens_and_characters() -> None:
    assert ended(StopCondition((), ["zx"], PIECES), [5, 5, 0], [1]) == ([5, 5], "stop")
    assert ended(StopCondition((), ["€"], PIECES), [0, 6, 7, 0], [4]) == ([0, 6, 7], "stop")


def test_a_stop_string_far_back_is_not_looked_for_twice() -> None:
    tokens = [0] * 400 + [1]
    transcript = Transcript(StopCondition((), ["ab"], PIECES), 1000, "length")
    transcript.extend(tokens)
    assert (len(transcript.tokens), transcript.finish) == (401, "stop")


def test_an_end_token_counts_before_a_stop_string_and_both_before_the_limit() -> None:
    stop = StopCondition({8}, ["end"], PIECES)
    assert ended(stop, [0] * 11 + [8], [12])[1] == "eos"
    assert ended(StopCondition((), ["ab"], PIECES), [0] * 11 + [1], [12])[1] == "stop"


def test_the_answer_is_what_stands_before_the_end() -> None:
    stop = StopCondition({8}, ["\n", "yz"], PIECES)
    assert stop.text([0, 1, 8]) == "ab"
    assert stop.text([0, 5, 4]) == "ax"
    assert stop.text([2]) == "ab"


def test_stop_strings_need_a_tokenizer_and_a_character() -> None:
    with pytest.raises(FalconLabError, match="need a tokenizer"):
        StopCondition((), ["x"])
    with pytest.raises(FalconLabError, match="is empty"):
        StopCondition((), ["x", ""], PIECES)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        (0, 5, "prompt is empty"),
        (10, 5, "has 10 tokens"),
        (11, 5, "at most 10"),
        (3, 0, "at least 1"),
    ],
)
def test_a_prompt_without_room_to_go_on_is_refused(prompt: int, new: int, message: str) -> None:
    with pytest.raises(FalconLabError, match=message):
        begin(torch.zeros(prompt, dtype=torch.long), new, 10, StopCondition())


@pytest.mark.parametrize(
    ("new", "length", "finish"), [(5, 5, "length"), (7, 7, "length"), (8, 7, "context")]
)
def test_prompt_and_answer_fit_the_targets_positions(new: int, length: int, finish: str) -> None:
    transcript = begin(torch.zeros(3, dtype=torch.long), new, 10, StopCondition())
    transcript.extend([0] * 20)
    assert (len(transcript.tokens), transcript.finish) == (length, finish)
