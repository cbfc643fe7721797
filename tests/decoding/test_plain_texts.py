from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.decoding.plain import PlainEngine, continue_texts
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.sampling import Sampling
from tiny_models import FAMILIES, tiny_target

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14], [3, 4, 5, 6, 7, 8, 9, 10]]


def _written(target: Any, length: int, prompts: Any = PROMPTS, **side: int) -> list[list[int]]:
    return [text for _, text in sorted(continue_texts(target, prompts, length, **side))]


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
    texts = _written(target, 20)
    expected = [_alone(target, prompt, 20 - len(prompt)) for prompt in PROMPTS]
    assert texts == expected
    assert texts[0] == texts[3]
    assert _written(target, 20, batch_size=2) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_prompts_have_in_common_need_not_be_read_again(family: str) -> None:
    target = tiny_target(family)
    common = [3, 9, 4, 8, 5, 7, 6, 10]
    prompts = [[*common[: 8 - n % 5], 11 + n % 3, *range(12, 12 + n % 4)] for n in range(12)]
    read: list[int] = []
    plainly = target.read
    target.read = lambda prompt, *rest, **named: (  # type: ignore[method-assign]
        read.append(len(prompt)) or plainly(prompt, *rest, **named)
    )

    def texts(*, shares: bool) -> list[list[int]]:
        found = PlainEngine(target, shares_beginnings=shares).generate_batch(
            [torch.tensor(prompt) for prompt in prompts],
            batch_size=3,
            max_new_tokens=9,
            sampling=Sampling(),
            generators=[torch.Generator() for _ in prompts],
            stop=StopCondition(),
        )
        return [generation.tokens for generation in found]

    assert texts(shares=True) == texts(shares=False)
    assert sum(read[:12]) < sum(read[12:]) == sum(map(len, prompts))


def test_a_text_ends_with_an_end_token_while_others_go_on() -> None:
    target = tiny_target()
    free = _written(target, 24)
    target.eos_ids = frozenset({free[1][4]})
    texts = _written(target, 24)
    assert texts[1] == free[1][: free[1].index(free[1][4], 1) + 1]
    assert len(texts[1]) < 24
    for text, whole in zip(texts, free, strict=True):
        assert text == whole[: len(text)]
        assert len(text) == 24 or text[-1] in target.eos_ids


def test_a_prompt_as_long_as_a_text_stays_as_it_is() -> None:
    texts = _written(tiny_target(), 3, [[3, 4, 5], [6]])
    assert texts[0] == [3, 4, 5]
    assert len(texts[1]) == 3
