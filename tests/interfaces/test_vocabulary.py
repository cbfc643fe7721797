"""Which tokens a draft vocabulary has, what its columns are about, and the rows of the LM head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from falcon_lab.drafters.sequences import copies_of
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, DraftOutput, DraftVocabulary
from falcon_lab.interfaces.vocabulary import OUTSIDE, always_kept
from tiny_models import FAMILIES, tiny_target

V = 12
TARGET = tiny_target(vocab=V)


def vocabulary(size: int, counts: list[int] | None = None, target: Any = TARGET) -> DraftVocabulary:
    return DraftVocabulary(target, size, None if counts is None else torch.tensor(counts))


@given(st.lists(st.integers(0, 3), min_size=V, max_size=V), st.integers(2, V))
def test_the_most_frequent_tokens_are_in_it_and_of_equals_the_first(
    counts: list[int], size: int
) -> None:
    ids = vocabulary(size, counts).ids.tolist()
    always = always_kept(TARGET)
    assert always == [0, 1]
    by_rank = [token for token in range(V) if token not in always]
    by_rank.sort(key=lambda token: (-counts[token], token))
    assert ids == sorted([*always, *by_rank[: size - len(always)]])


@pytest.mark.parametrize("counts", [None, [], [5], [0] * V, [9] * (V + 5)])
def test_it_has_its_size_however_few_tokens_the_data_have(counts: list[int] | None) -> None:
    assert vocabulary(6, counts).ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_special_tokens_need_room() -> None:
    with pytest.raises(ValueError, match="2 special tokens"):
        vocabulary(1)


@pytest.mark.parametrize(("size", "there"), [(None, False), (V - 1, True), (V, False), (99, False)])
def test_all_tokens_are_no_draft_vocabulary(size: int | None, there: bool) -> None:
    assert (BuildContext(TARGET).draft_vocabulary(size) is not None) == there


def test_tokens_are_counted_only_where_they_are_to_be_chosen() -> None:
    def counts() -> torch.Tensor:
        raise AssertionError("counted in vain")

    assert BuildContext(TARGET, token_counts=counts).draft_vocabulary(None) is None


@given(st.lists(st.integers(0, 3), min_size=V, max_size=V), st.integers(2, V - 1))
def test_columns_and_tokens_belong_to_each_other(counts: list[int], size: int) -> None:
    words = vocabulary(size, counts)
    columns = torch.arange(size)
    assert torch.equal(words.columns(words.tokens(columns)), columns)
    outside = [token for token in range(V) if token not in words.ids.tolist()]
    assert words.columns(torch.tensor(outside)).tolist() == [OUTSIDE] * len(outside)
    values = torch.randn(2, size)
    spread = words.spread(values, -1.0)
    assert spread.shape == (2, V)
    assert torch.equal(spread[:, words.ids], values)
    assert (spread[:, outside] == -1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_the_target(family: str) -> None:
    target = tiny_target(family, vocab=V)
    words = vocabulary(5, [0, 0, 1, 0, 9, 3, 0, 0, 0, 0, 0, 2], target)
    assert words.ids.tolist() == [0, 1, 4, 5, 11]
    features = torch.randn(3, target.hidden_size)
    expected = target.head(features)[:, words.ids]
    torch.testing.assert_close(words.head(features), expected)
    torch.testing.assert_close(words.copy_head()(features), expected)


def test_rows_are_neither_saved_nor_trained_nor_broadcast_and_copies_share_them() -> None:
    words = vocabulary(5)
    assert list(words.state_dict()) == ["ids"]
    assert not list(words.parameters())
    assert {buffer.dtype for buffer in words.buffers()} == {torch.long}
    for copied in copies_of(words, 2):
        assert copied.rows is words.rows
        assert copied.ids is words.ids


def test_rows_stay_in_the_targets_precision() -> None:
    words = vocabulary(5)
    features = torch.randn(3, TARGET.hidden_size)
    expected = words.head(features)
    assert torch.equal(words.to(torch.bfloat16).head(features), expected)
    assert torch.equal(words.float().head(features), expected)


def test_loaded_tokens_bring_their_rows() -> None:
    chosen, fresh = vocabulary(4, [0, 0, 0, 0, 0, 0, 0, 8, 0, 9, 0, 0]), vocabulary(4)
    features = torch.randn(3, TARGET.hidden_size)
    fresh.load_state_dict(chosen.state_dict())
    assert torch.equal(fresh.head(features), chosen.head(features))
    assert fresh.columns(torch.tensor([9, 2])).tolist() == [3, OUTSIDE]


@pytest.mark.parametrize(
    ("ids", "said"),
    [([0, 1, 2, V], "token 12"), ([-1, 1, 2, 3], "token -1"), ([0, 2, 1, 3], "ascending order")],
)
def test_tokens_that_are_none_of_the_target_are_refused(ids: list[int], said: str) -> None:
    with pytest.raises(FalconLabError, match=said):
        vocabulary(4).load_state_dict({"ids": torch.tensor(ids)})


@pytest.mark.parametrize("change", ["hooked", "another class"])
def test_an_lm_head_without_rows_is_refused(change: str) -> None:
    target = tiny_target(vocab=V)
    head = target.model.get_output_embeddings()
    if change == "hooked":
        head.register_forward_hook(lambda *_: None)
    else:
        head.__class__ = type("Quantised", (torch.nn.Linear,), {})
    with pytest.raises(FalconLabError, match="draft_vocabulary=null"):
        vocabulary(5, target=target)


def test_an_output_speaks_of_the_targets_tokens() -> None:
    words = vocabulary(4, [0, 0, 0, 0, 0, 0, 0, 8, 0, 9, 0, 0])
    logits = torch.randn(2, 1, 4)
    output = DraftOutput(logits, vocabulary=words)
    assert output.target_tokens(torch.tensor([2, 3])).tolist() == [7, 9]
    assert torch.equal(
        output.target_logits.log_softmax(-1)[..., words.ids], output.log_probabilities
    )
    whole = DraftOutput(logits)
    assert torch.equal(whole.target_logits, logits)
