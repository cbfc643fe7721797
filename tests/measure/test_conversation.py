"""Prompts as tokens, turn by turn."""

from __future__ import annotations

import pytest

from falcon_lab.data.heldout import Prompt
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import encode_prompts
from measuring import ChatLetters, Letters, prompt
from tiny_models import tiny_tokenizer


def text(tokens: object) -> str:
    return "".join(chr(t) for t in tokens.tolist())  # type: ignore[attr-defined]


def test_turns_and_answers_are_joined_without_the_end_of_text() -> None:
    two = prompt("p", "ab", "ef")
    assert text(two.tokens([])) == "ab"
    assert text(two.tokens([[ord("c"), ord("d"), 0]])) == "abcdef"


def test_a_chat_template_renders_the_history() -> None:
    two = prompt("p", "ab", "ef", tokenizer=ChatLetters(), chat=True)
    assert text(two.tokens([])) == "<u>ab<a>"
    assert text(two.tokens([[ord("c"), 0]])) == "<u>ab<a>c<u>ef<a>"


def test_a_chat_template_is_used_where_there_is_one_and_can_be_left_out() -> None:
    one = Prompt(id="p", category="x", turns=["hi"])
    assert not encode_prompts([one], Letters())[0].chat
    assert encode_prompts([one], ChatLetters())[0].chat
    assert not encode_prompts([one], ChatLetters(), chat=False)[0].chat


@pytest.mark.parametrize("template", ["{% bad", "{{ x.y.z }}", "{{ raise_exception(1) }}", 3])
def test_a_template_that_cannot_be_applied_is_refused_with_the_prompt(template: object) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(FalconLabError, match=r"prompt 'p7', turn 1: .*chat template refuses it"):
        prompt("p7", "ab", tokenizer=tokenizer, chat=True).tokens([])


def test_a_prompt_that_encodes_to_nothing_is_named() -> None:
    with pytest.raises(FalconLabError, match="'p7'"):
        prompt("p7", "").tokens([])


def test_ids_that_stand_twice_and_prompts_without_turns_are_refused() -> None:
    one = Prompt(id="p", category="x", turns=["hi"])
    with pytest.raises(FalconLabError, match="'p' stands twice"):
        encode_prompts([one, one], Letters())
    with pytest.raises(FalconLabError, match="'q' has no turns"):
        encode_prompts([Prompt(id="q", category="x", turns=[])], Letters())


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named_with_its_tokens() -> None:
    long = Prompt(id="p9", category="x", turns=["letters"])
    for longest in (3, 7):
        with pytest.raises(FalconLabError, match=rf"'p9'.* 7 tokens .* {longest} "):
            encode_prompts([long], Letters(), longest=longest)
    (two,) = encode_prompts([Prompt(id="p", category="x", turns=["a", "b"])], Letters(), longest=6)
    with pytest.raises(FalconLabError, match="'p', turn 2"):
        two.tokens([[ord("c")] * 5])
