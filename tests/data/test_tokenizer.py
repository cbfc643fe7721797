import pytest

from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.errors import FalconLabError

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
