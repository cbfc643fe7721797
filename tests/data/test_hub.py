"""Corpora of the hub by name, from tiny files and a stand-in of ``datasets``."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_targets import chat_target
from falcon_lab.config.schema import DataConfig
from falcon_lab.data.corpora import (
    corpus,
    corpus_files,
    corpus_fingerprint,
    first_documents,
    left_out,
)
from falcon_lab.data.datamodule import prepare_data
from falcon_lab.data.documents import PLAIN, render
from falcon_lab.data.encoding import encode
from falcon_lab.data.generated.corpus import SPLITS
from falcon_lab.data.hub import HUB_CORPORA, wanted
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.discovery import load_components
from tiny_models import tiny_target

Row = dict[str, Any]


def sharegpt(number: int) -> Row:
    turns = [("system", "s"), ("human", f"q{number}"), ("gpt", "a"), ("human", "b"), ("gpt", "c")]
    said = [{"from": speaker, "value": text} for speaker, text in turns]
    return {"id": f"x{number}", "conversations": said}


def ultrachat(number: int) -> Row:
    said = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]
    return {"prompt": f"q{number}", "prompt_id": str(number), "messages": said}


def gsm8k(number: int) -> Row:
    return {"question": f"q{number}", "answer": "a"}


def nemotron(number: int) -> Row:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{number}"}]
    return {"input": said, "output": "a", "category": "chat"}


SHAPES = {
    "sharegpt": sharegpt,
    "ultrachat": ultrachat,
    "perfectblend": sharegpt,
    "open-perfectblend": sharegpt,
    "gsm8k": gsm8k,
    "magpie": sharegpt,
    "nemotron": nemotron,
    "hermes-fc": sharegpt,
}


def jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))


class Hub:
    """``datasets``, as far as it is used.

    Attributes:
        rows: of every data set.
        asked: what was asked for, how, and how many rows of it were read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> None:
        self.rows, self.asked, self.read = rows, list[Any](), 0
        module = types.ModuleType("datasets")
        module.load_dataset = self.load  # type: ignore[attr-defined]
        module.load_from_disk = lambda path: {"train_sft": rows, "test": []}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)

    def load(self, *where: str, split: str, **options: Any) -> Iterator[Row]:
        self.asked.append((*where, split, options))
        for row in self.rows:
            self.read += 1
            yield row


def everything(name: str) -> list[Any]:
    return [document for split in SPLITS for document in corpus(name, split=split)]


@pytest.mark.parametrize("name", HUB_CORPORA)
def test_a_copy_in_the_shape_of_its_data_set_becomes_chats(name: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "copy.jsonl", [SHAPES[name](number) for number in range(60)])
    found = everything(f"{name}@{path}")
    assert len(found) == 60
    assert {m["content"] for d in found for m in d.messages if m["content"][0] == "q"} == {
        f"q{number}" for number in range(60)
    }
    assert {d.messages[-1]["role"] for d in found} == {"assistant"}
    assert left_out(f"{name}@{path}") == f"60 chats of 60 records of {path}"


def test_a_corpus_is_streamed_once_and_no_further_than_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub(monkeypatch, [ultrachat(number) for number in range(500)])
    assert len(list(first_documents("ultrachat:80", 4, seed=0))) == 4
    assert hub.read <= 5
    assert len(everything("ultrachat:80")) == 80
    assert hub.read <= 90
    asked = ("HuggingFaceH4/ultrachat_200k", "train_sft", {"streaming": True})
    assert all(each == asked for each in hub.asked)
    before = len(hub.asked)
    everything("ultrachat:80")
    assert len(hub.asked) == before
    assert corpus_files("ultrachat:80") == []
    assert corpus_fingerprint("ultrachat:80") != corpus_fingerprint("ultrachat:81")


def test_a_chat_stays_on_its_side_when_more_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, [ultrachat(number) for number in range(300)])
    for split in SPLITS:
        few = {document.id for document in corpus("ultrachat:150", split=split)}
        assert few
        assert few < {document.id for document in corpus("ultrachat:300", split=split)}


def test_a_copy_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "copy.jsonl"
    for count in (50, 60):
        jsonl(path, [gsm8k(number) for number in range(count)])
        assert len(everything(f"gsm8k@{path}")) == count


BROKEN: dict[str, list[Row]] = {
    "empty": [
        {"conversations": []},
        {"conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "a"}]},
    ],
    "of unknown roles": [{"conversations": [{"from": "bing", "value": "a"}]}],
    "with two turns of a user in a row": [
        {"conversations": [{"from": who, "value": "a"} for who in ("human", "human", "gpt")]}
    ],
    "without an answer": [{"conversations": [{"from": "human", "value": "a"}]}],
    "that begin with an answer": [
        {"conversations": [{"from": who, "value": "a"} for who in ("gpt", "human", "gpt")]}
    ],
    "with parts that are no text": [{"conversations": [{"from": "human", "value": 3}]}],
    "broken": [{"conversations": [{"from": "human"}]}, {"conversations": ["a"]}],
}


def test_what_no_drafter_could_be_trained_on_is_counted_and_said_once(tmp_path: Path) -> None:
    bad = [row for rows in BROKEN.values() for row in rows]
    path = jsonl(tmp_path / "copy.jsonl", [*bad, *(sharegpt(number) for number in range(60))])
    name = f"sharegpt@{path}"
    assert len(everything(name)) == 60
    sentence = left_out(name)
    assert sentence is not None
    assert f"60 chats of {60 + len(bad)} records" in sentence
    for reason, rows in BROKEN.items():
        assert f"{len(rows)} {reason}" in sentence
    said: list[str] = []
    prepare_data(
        DataConfig(corpus=name, length=32, validation=1, chat_template="plain"),
        tiny_target(vocab=300),
        drafter={"name": "falcon"},
        components=load_components(),
        announce=said.append,
    )
    assert [line for line in said if "left out" in line] == [f"{name}: {sentence}"]


def test_only_what_the_assistant_says_counts_in_the_loss(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "copy.jsonl", [sharegpt(number) for number in range(60)])
    tokenizer = chat_target().tokenizer
    for document in everything(f"sharegpt@{path}")[:3]:
        encoded = encode(document, tokenizer, PLAIN)
        counted = [t for t, m in zip(encoded.tokens, encoded.loss_mask, strict=True) if m]
        expected = "a" + tokenizer.eos_token + "c" + tokenizer.eos_token
        assert tokenizer.decode(counted) == expected


def test_tools_their_calls_and_answers_reach_the_chat_template(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "assistant", "content": "two"},
    ]
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    rows = [{"messages": messages, "tools": tools} for _ in range(60)]
    path = jsonl(tmp_path / "copy.jsonl", rows)
    template = (
        "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments.a }}{% endif %}"
        "{{ m.content }}!{% endgeneration %}{% else %}<{{ m.role }}"
        "{% if 'tool_calls' in m %}?{% endif %}{{ m.content }}>{% endif %}{% endfor %}"
    )
    document = everything(f"ultrachat@{path}")[0]
    tokenizer = tiny_target(vocab=300).tokenizer
    rendered = render(document, tokenizer, template)
    assert rendered.text == "[add]<userq>1!<tool2>two!"
    assert [rendered.text[start:end] for start, end in rendered.answers] == ["1!", "two!"]


# --- refusals -----------------------------------------------------------------------------------


def test_another_column_is_named_with_data_set_and_record(tmp_path: Path) -> None:
    rows = [*(gsm8k(number) for number in range(3)), {"problem": "q", "answer": "a"}]
    path = jsonl(tmp_path / "copy.jsonl", rows)
    with pytest.raises(FalconLabError, match=r"record 3 of .*'question' is not among problem"):
        everything(f"gsm8k@{path}")
    jsonl(path, [{"question": "q", "answer": None}])
    with pytest.raises(FalconLabError, match=r"record 0 of .*'answer' is null"):
        everything(f"gsm8k@{path}")
    assert not list((tmp_path / "cache" / "corpora").glob("gsm8k-*/records.json"))


def test_without_a_network_a_copy_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, [])

    def offline(*where: str, **options: Any) -> None:
        raise ConnectionError("no route\nto host")

    hub.load = offline  # type: ignore[method-assign, assignment]
    sys.modules["datasets"].load_dataset = offline  # type: ignore[attr-defined]
    with pytest.raises(FalconLabError, match=r"ultrachat_200k .*no route\).*ultrachat@PATH"):
        everything("ultrachat")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FalconLabError, match=r"pip install 'falcon-lab\[data\]'.*ultrachat@PATH"):
        everything("ultrachat")


def test_what_datasets_has_saved_to_disk_is_read_by_its_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(monkeypatch, [ultrachat(number) for number in range(60)])
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["train_sft", "test"]}')
    assert len(everything(f"ultrachat@{saved}")) == 60
    with pytest.raises(FalconLabError, match="no split 'train', but train_sft, test"):
        everything(f"magpie@{saved}")


def test_a_list_in_one_file_is_read_and_anything_else_refused(tmp_path: Path) -> None:
    whole = tmp_path / "copy.json"
    whole.write_text(json.dumps([sharegpt(number) for number in range(60)]))
    assert len(everything(f"sharegpt@{whole}")) == 60
    whole.write_text('{"a": 1}')
    with pytest.raises(FalconLabError, match=r"copy\.json: is an object; name a file of a list"):
        everything(f"magpie@{whole}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FalconLabError, match=r"neither a data set .* nor \.jsonl"):
        everything(f"sharegpt@{tmp_path / 'empty'}")
    with pytest.raises(FalconLabError, match="gone: cannot be read"):
        everything(f"sharegpt@{tmp_path / 'gone'}")
    with pytest.raises(FalconLabError, match=r"'many' is no number of records.*sharegpt:50000"):
        everything("sharegpt:many")
    with pytest.raises(FalconLabError, match="nothing is left"):
        everything(f"sharegpt@{jsonl(tmp_path / 'bad.jsonl', BROKEN['empty'])}")


def test_a_path_and_other_names_are_no_corpora_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wanted("generated") is None
    assert wanted("data/ultrachat") is None
    with pytest.raises(FalconLabError, match="did you mean 'ultrachat'"):
        everything("ultrachad")
    monkeypatch.chdir(tmp_path)
    Path("sharegpt").mkdir()
    for number in range(40):
        Path(f"sharegpt/{number}.txt").write_text(f"text {number}")
    assert len(everything("sharegpt")) == 40
