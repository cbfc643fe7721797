import json
from pathlib import Path

import pytest

from falcon_lab.data.documents import read_jsonl, read_samples
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
    assert list(read_samples(write(tmp_path, json.dumps(sample)))) == [(1, "1", WANTED)]


def test_system_messages_ids_texts_and_blank_lines_are_understood(tmp_path: Path) -> None:
    system = {"conversations": [{"from": "system", "value": "be"}, {"from": "gpt", "value": "ok"}]}
    file = write(
        tmp_path, "\ufeff" + json.dumps({"id": "a", **system}), "", '{"text": "plain"}', ""
    )
    assert list(read_samples(file)) == [
        (1, "a", [{"role": "system", "content": "be"}, {"role": "assistant", "content": "ok"}]),
        (3, "3", "plain"),
    ]


def test_what_a_message_says_beside_its_text_is_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    [(_, _, messages)] = read_samples(write(tmp_path, json.dumps({"messages": [call]})))
    assert messages == [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]


def test_samples_with_one_id_are_both_kept_and_told_apart(tmp_path: Path) -> None:
    line = json.dumps({"id": "x", "messages": WANTED})
    assert [key for _, key, _ in read_samples(write(tmp_path, line, line))] == ["x", "x@2"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"messages": [', "not JSON .* at column 15"),
        ("[1]", "a JSON object is needed, found a list"),
        ('{"prompt": "x"}', r"no messages, conversations or text among its keys \(prompt\)"),
        ('{"messages": []}', "found an empty list"),
        ('{"messages": "hi"}', "found a text"),
        ('{"messages": ["hi"]}', "message 1 is a text, not an object"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no 'content'"),
        ('{"conversations": [{"from": "alien", "value": "x"}]}', "message 1 is by 'alien'"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', r"message 1 is by \['user'\]"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1 says a number"),
        ('{"messages": [{"role": "user", "content": [{"image": "x"}]}]}', "not text"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_fault(
    tmp_path: Path, line: str, fault: str
) -> None:
    file = write(tmp_path, json.dumps({"messages": WANTED}), line)
    before = file.read_bytes()
    with pytest.raises(FalconLabError, match=rf"chats\.jsonl:2: .*{fault}"):
        list(read_samples(file))
    assert file.read_bytes() == before


def test_a_line_that_is_not_utf8_and_a_missing_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(FalconLabError, match=r"latin\.jsonl:2: not UTF-8"):
        list(read_jsonl(file))
    with pytest.raises(FalconLabError, match=r"gone\.jsonl: No such file"):
        list(read_jsonl(tmp_path / "gone.jsonl"))


def test_line_separators_inside_a_text_do_not_cut_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False))
    assert list(read_samples(file)) == [(1, "1", "a\u2028b\x85c")]
