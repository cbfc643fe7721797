from __future__ import annotations

import pytest
import torch

from fakes.decoding import plain
from fakes.statistics import chi_square
from fakes.table_target import TableTarget
from falcon_lab.decoding.generation import Round
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.sampling import Sampling


def test_greedy_output_is_the_argmax_of_every_context() -> None:
    target = TableTarget()
    text = [1, 2]
    for _ in range(20):
        text.append(int(target.table[text[-2], text[-1]].argmax()))
    out = plain(target, [1, 2], 20)
    assert out.tokens == text[2:]
    assert out.finish == "length"
    assert out.rounds == [Round(nodes=0, depth=0, passes=0, accepted=0, emitted=1)] * 19


def test_three_sampled_tokens_follow_the_targets_distribution() -> None:
    target, generator = TableTarget(4), torch.Generator().manual_seed(2)
    settings = {"temperature": 0.8, "top_p": 0.9}
    texts = [plain(target, [1, 2], 3, generator=generator, **settings).tokens for _ in range(1500)]
    assert chi_square(torch.tensor(texts), target.joint([1, 2], Sampling(**settings), 3)) > 0.01


def test_it_ends_at_an_end_token_at_the_length_and_at_the_context() -> None:
    target = TableTarget(positions=12)
    free = plain(target, [1, 2], 10)
    assert (len(free.tokens), free.finish) == (10, "length")
    longer = plain(target, [1, 2], 11)
    assert (longer.tokens, longer.finish) == (free.tokens, "context")
    last = free.tokens[3]
    cut = plain(target, [1, 2], 10, stop=StopCondition({last}))
    assert (cut.tokens, cut.finish) == (free.tokens[: free.tokens.index(last) + 1], "eos")


def test_every_token_is_streamed() -> None:
    seen: list[int] = []
    out = plain(TableTarget(), on_round=lambda tokens, *_: seen.extend(tokens))
    assert seen == out.tokens


def test_time_is_split_between_the_target_and_the_rest() -> None:
    seconds = plain(TableTarget()).seconds
    assert seconds.prefill > 0
    assert seconds.verify > 0
    assert seconds.draft == seconds.commit == 0
    assert seconds.total == pytest.approx(seconds.verify + seconds.accept + seconds.overhead)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(FalconLabError, match="prompt is empty"):
        plain(TableTarget(), [])
