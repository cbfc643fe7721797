"""Files of chats and texts, and chat templates."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.data.documents import (
    PLAIN,
    Document,
    Rendered,
    load_template,
    read_documents,
    read_jsonl,
    render,
)
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.errors import FalconLabError

WANTED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(folder: Path, *lines: str) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


@pytest.mark.parametrize(
    "sample",
    [
        {"messages": WANTED},
        {"conversations": WANTED},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, WANTED[1]]},
    ],
)
def test_every_layout_of_a_chat_becomes_roles_and_contents(
    tmp_path: Path, sample: dict[str, object]
) -> None:
    file = write(tmp_path, json.dumps(sample))
    wanted = Document("a:1", None, WANTED, f"{file}:1")
    assert list(read_documents(file, "a")) == [wanted]


def test_system_messages_ids_texts_and_blank_lines_are_understood(tmp_path: Path) -> None:
    system = {"conversations": [{"from": "system", "value": "be"}, {"from": "gpt", "value": "ok"}]}
    file = write(
        tmp_path, "\ufeff" + json.dumps({"id": "a", **system}), "", '{"text": "plain"}', ""
    )
    chat = [{"role": "system", "content": "be"}, {"role": "assistant", "content": "ok"}]
    assert list(read_documents(file, "chats")) == [
        Document("chats:a", None, chat, f"{file}:1"),
        Document("chats:3", "plain", None, f"{file}:3"),
    ]


def test_what_a_message_says_beside_its_text_is_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    [document] = read_documents(write(tmp_path, json.dumps({"messages": [call]})), "a")
    assert document.messages == [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    ]


def test_samples_with_one_id_are_both_kept_and_told_apart(tmp_path: Path) -> None:
    line = json.dumps({"id": "x", "messages": WANTED})
    found = read_documents(write(tmp_path, line, line), "a")
    assert [document.id for document in found] == ["a:x", "a:x@2"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"messages": [', "not whole JSON.* at column 14"),
        (
            '{"text": "cut \\ud83d"}',
            "not whole JSON.*half a character.*mend the line or take it out",
        ),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "not whole JSON.*recursion"),
        ('{"text": "a\0b"}', "not whole JSON.*control character"),
        ("[1]", "a JSON object is needed, found a list"),
        ('{"prompt": "x"}', r"no messages, conversations or text among its keys \(prompt\)"),
        ('{"messages": []}', "found an empty list"),
        ('{"messages": "hi"}', "found a text"),
        ('{"messages": ["hi"]}', "message 1 is a text, not an object"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no 'content'"),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', "message 1 is by 'alien'"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', r"message 1 is by \['user'\]"),
        ('{"messages": [{"role": "user", "content": 3}]}', "the content of message 1 is a number"),
        ('{"messages": [{"role": "user", "content": [{"image": "x"}]}]}', "not text"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_fault(
    tmp_path: Path, line: str, fault: str
) -> None:
    file = write(tmp_path, json.dumps({"messages": WANTED}), line)
    before = file.read_bytes()
    with pytest.raises(FalconLabError, match=rf"chats\.jsonl:2: .*{fault}"):
        list(read_documents(file, "a"))
    assert file.read_bytes() == before


def test_marks_other_ends_of_lines_and_figures_of_other_programs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a", "score": NaN}\r\n\r\n  \n{"text": "b"}')
    assert [document.text for document in read_documents(file, "a")] == ["a", "b"]


def test_a_template_that_writes_half_characters_is_named_with_the_sample() -> None:
    document = Document("c", messages=WANTED, source="chats.jsonl:7")
    with pytest.raises(FalconLabError, match=r"sample c \(chats\.jsonl:7\): .*surrogate"):
        render(document, tokenizer(), "{{ '\\ud83d' }}")


def test_a_line_that_is_not_utf8_and_a_missing_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(FalconLabError, match=r"latin\.jsonl:2: not UTF-8"):
        list(read_jsonl(file))
    with pytest.raises(FalconLabError, match=r"gone\.jsonl: cannot be read .No such file"):
        list(read_jsonl(tmp_path / "gone.jsonl"))


def test_line_separators_inside_a_text_do_not_cut_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False))
    [document] = read_documents(file, "a")
    assert document.text == "a\u2028b\x85c"


# --- templating ------------------------------------------------------------------------


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING = "{{ messages | length }}: {% for m in messages %}{{ m.content }};{% endfor %}"


@cache
def tokenizer() -> Any:
    return train_tokenizer(generate_modules("train", 20), 300)


def chat(*turns: str) -> Document:
    """Turns of user and assistant in alternation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return Document("c", messages=messages, source="chats.jsonl:7")


def answers(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.answers]


def test_marks_of_the_template_enclose_the_answers() -> None:
    rendered = render(chat("hi", "yo", "and?", "no"), tokenizer(), PLAIN)
    # The engine trims the newline behind a block, so the template's last one is not shown.
    assert rendered.text == (
        "### User\nhi\n### Assistant\nyo<|endoftext|>### User\nand?\n### Assistant\nno<|endoftext|>"
    )
    assert answers(rendered) == ["yo<|endoftext|>", "no<|endoftext|>"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'assistant' %}\n"
        "  {%- generation -%}  \n {{ m.content }}!  {%- endgeneration -%}\n {% else %}"
        "{{ m.content }}?{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}\n"
        "  {% generation %}\n{{ m.content }}!\n  {% endgeneration %}\n"
        "{% else %}{{ m.content }}?{% endif %}\n{% endfor %}",
    ],
)
def test_marks_agree_with_what_transformers_reads_from_them(template: str) -> None:
    document = chat("hi", "yo there", "and", "no thing")
    own = render(document, tokenizer(), template)
    theirs = tokenizer().apply_chat_template(
        document.messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    encoded = tokenizer()(own.text, return_offsets_mapping=True, add_special_tokens=False)
    mask = [
        int(any(first <= start < last for first, last in own.answers))
        for start, _ in encoded["offset_mapping"]
    ]
    assert encoded["input_ids"] == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]


def test_without_marks_answers_are_found_between_prompts() -> None:
    rendered = render(chat("hi", "yo", "and?", "no"), tokenizer(), CHATML)
    assert answers(rendered) == ["yo<|im_end|>\n", "no<|im_end|>\n"]


def test_an_answer_that_looks_different_while_it_is_the_last_is_found_too() -> None:
    rendered = render(chat("hi", "yo", "and?", "no"), tokenizer(), THINKING)
    assert answers(rendered) == ["yo<|im_end|>\n", "<think></think>\nno<|im_end|>\n"]


def test_what_an_assistant_says_first_of_all_is_context() -> None:
    messages = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]
    rendered = render(Document("c", messages=messages), tokenizer(), CHATML)
    assert answers(rendered) == ["yo<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (COUNTING, "mark the answers in it"),
        ("{{ raise_exception('roles must alternate') }}", "refuses it .*roles must alternate"),
        ("{% for m in messages %}{{ m.content", "refuses it"),
    ],
)
def test_a_template_that_does_not_serve_is_an_error_with_the_samples_id(
    template: str, fault: str
) -> None:
    with pytest.raises(FalconLabError, match=rf"sample c \(chats\.jsonl:7\): .*{fault}"):
        render(chat("hi", "yo", "and?", "no"), tokenizer(), template)


def test_a_tokenizer_without_a_template_asks_for_one() -> None:
    with pytest.raises(FalconLabError, match=r"set data\.chat_template=plain"):
        render(chat("hi", "yo"), tokenizer())


def test_templates_have_names(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    assert load_template(None) is None
    assert load_template("plain") == PLAIN
    assert load_template(str(file)) == CHATML
    file.write_bytes(b"\xff")
    for name in ("gone", str(tmp_path), str(file), "a\0b", "a" * 300):
        with pytest.raises(FalconLabError, match=r"data\.chat_template: cannot read '.*say plain"):
            load_template(name)
