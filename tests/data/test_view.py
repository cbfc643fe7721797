from falcon_lab.data.documents import PLAIN, Document
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.data.view import spans


def test_a_sample_is_shown_whole_with_its_special_tokens() -> None:
    tokenizer = train_tokenizer(generate_modules("train", 20), 300)
    text = next(generate_modules("train", 1))
    assert spans(Document("a", text=text), tokenizer) == [(text + "<|endoftext|>", True)]


def test_what_is_learnt_of_a_chat_stands_apart() -> None:
    tokenizer = train_tokenizer(generate_modules("train", 20), 300)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    shown = spans(Document("a", messages=turns), tokenizer, PLAIN)
    assert shown[:2] == [("### User\nhi\n### Assistant\n", False), ("yo<|endoftext|>", True)]
    assert "".join(text for text, _ in shown).startswith("### User\nhi\n### Assistant\nyo")
