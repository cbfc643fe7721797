"""Documents as tokens, and the tokenizer that is trained from scratch."""

from functools import cache
from typing import Any

import pytest

from falcon_lab.data.documents import PLAIN, Document
from falcon_lab.data.encoding import (
    TOGETHER,
    Encoded,
    chunks,
    encode,
    encode_all,
    spans,
    train_tokenizer,
)
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.errors import FalconLabError

CHAT = Document(
    "c",
    messages=[
        {"role": "user", "content": "def f"},
        {"role": "assistant", "content": "return x"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "return y"},
    ],
    source="chats.jsonl:7",
)
CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def tokenizer() -> Any:
    return train_tokenizer(generate_modules("train", 20), 300)


class WithoutOffsets:
    """A tokenizer as transformers has them in Python: it does not tell where tokens stand."""

    is_fast = False

    def __init__(self, joining: bool = False) -> None:
        self.joining = joining

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        if self.joining:  # one token of the whole, which no prefix shares
            return {"input_ids": [len(text)]}
        return {"input_ids": [ord(character) for character in text]}


def test_all_of_a_text_is_in_the_loss_and_it_ends_with_eos_once() -> None:
    encoded = encode(Document("a", text="x = 1\n"), tokenizer())
    assert tokenizer().decode(encoded.tokens) == "x = 1\n<|endoftext|>"
    assert all(encoded.loss_mask)
    ended = encode(Document("a", text="x = 1\n<|endoftext|>"), tokenizer())
    assert ended.tokens == encoded.tokens


def test_of_a_chat_only_the_answers_are_in_the_loss() -> None:
    assert spans(CHAT, tokenizer(), CHATML) == [
        ("[user]def f\n[assistant]", False),
        ("return x\n", True),
        ("[user]again\n[assistant]", False),
        ("return y\n", True),
    ]


def test_a_tokenizer_that_tells_no_offsets_gives_the_same_mask_by_prefixes() -> None:
    encoded = encode(CHAT, WithoutOffsets(), CHATML)
    counted = [chr(t) for t, m in zip(encoded.tokens, encoded.loss_mask, strict=True) if m]
    assert "".join(counted) == "return x\nreturn y\n"


def test_prefixes_that_do_not_hold_are_an_error_with_the_samples_id() -> None:
    with pytest.raises(FalconLabError, match=r"sample c \(chats\.jsonl:7\): the tokenizer joins"):
        encode(CHAT, WithoutOffsets(joining=True), CHATML)


def test_a_chat_with_nothing_to_learn_is_an_error_with_the_samples_id() -> None:
    alone = Document("q", messages=[{"role": "user", "content": "hi"}], source="f.jsonl:3")
    for template in (CHATML, PLAIN):
        with pytest.raises(FalconLabError, match=r"sample q \(f\.jsonl:3\): nothing in it"):
            encode(alone, tokenizer(), template)


def test_encoding_many_is_encoding_each() -> None:
    texts = [Document(str(n), text=t) for n, t in enumerate(generate_modules("train", 70))]
    assert len(texts) > TOGETHER
    mixed = [*texts[:3], CHAT, *texts[3:]]
    for documents in (texts, mixed):
        together = list(encode_all(documents, tokenizer(), PLAIN))
        assert together == [encode(document, tokenizer(), PLAIN) for document in documents]


def test_chunks_keep_the_mask_and_drop_what_teaches_nothing() -> None:
    encoded = Encoded(list(range(7)), [False, False, False, True, False, True, True])
    assert list(chunks(encoded, 3)) == [
        Encoded([3, 4, 5], [True, False, True]),
        Encoded([6], [True]),
    ]


# --- tokenizer -------------------------------------------------------------------------


TEXTS = list(generate_modules("train", 60))


def test_any_text_round_trips_and_generated_text_is_compressed() -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    assert len(tokenizer) == 400
    for text in (TEXTS[0], "\tx = 'ü'\r\n    # 漢字 🙂\x00", "  two  spaces  "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(TEXTS[0])["input_ids"]) < len(TEXTS[0]) / 2


def test_token_zero_ends_and_pads_and_is_never_written_by_text() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert tokenizer.pad_token_id == 0
    assert 0 not in tokenizer(TEXTS[0])["input_ids"]


def test_training_twice_gives_the_same_tokenizer() -> None:
    first, second = (train_tokenizer(TEXTS, 350) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(FalconLabError, match="at least 257"):
        train_tokenizer(TEXTS, 256)


# --- view ------------------------------------------------------------------------------


def test_a_sample_is_shown_whole_with_its_special_tokens() -> None:
    tokenizer = train_tokenizer(generate_modules("train", 20), 300)
    text = next(generate_modules("train", 1))
    assert spans(Document("a", text=text), tokenizer) == [(text + "<|endoftext|>", True)]


def test_what_counts_of_a_chat_stands_apart() -> None:
    tokenizer = train_tokenizer(generate_modules("train", 20), 300)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    shown = spans(Document("a", messages=turns), tokenizer, PLAIN)
    assert shown[:2] == [("### User\nhi\n### Assistant\n", False), ("yo<|endoftext|>", True)]
    assert "".join(text for text, _ in shown).startswith("### User\nhi\n### Assistant\nyo")
