from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.decoding.plain import PlainEngine, continue_texts
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.sampling import Sampling
from tiny_models import FAMILIES, tiny_target

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14], [3, 4, 5, 6, 7, 8, 9, 10]]


def _alone(target: Any, prompt: list[int], new: int) -> list[int]:
    stop = StopCondition(target.eos_ids, [], target.tokenizer)
    out = PlainEngine(target).generate(
        torch.tensor(prompt),
        max_new_tokens=new,
        sampling=Sampling(),
        generator=torch.Generator(),
        stop=stop,
    )
    return prompt + out.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_written_side_by_side_are_those_written_alone(family: str) -> None:
    target = tiny_target(family)
    texts = continue_texts(target, PROMPTS, 20)
    expected = [_alone(target, prompt, 20 - len(prompt)) for prompt in PROMPTS]
    assert texts == expected
    assert texts[0] == texts[3]


def test_a_text_ends_with_an_end_token_while_others_go_on() -> None:
    target = tiny_target()
    free = continue_texts(target, PROMPTS, 24)
    target.eos_ids = frozenset({free[1][4]})
    texts = continue_texts(target, PROMPTS, 24)
    assert texts[1] == free[1][: free[1].index(free[1][4], 1) + 1]
    assert len(texts[1]) < 24
    for text, whole in zip(texts, free, strict=True):
        assert text == whole[: len(text)]
        assert len(text) == 24 or text[-1] in target.eos_ids


def test_a_prompt_as_long_as_a_text_stays_as_it_is() -> None:
    texts = continue_texts(tiny_target(), [[3, 4, 5], [6]], 3)
    assert texts[0] == [3, 4, 5]
    assert len(texts[1]) == 3
