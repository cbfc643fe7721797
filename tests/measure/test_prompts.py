import builtins
import json
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.schema import PromptsConfig
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.data.heldout import Prompt
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.prompts import load_prompts


@cache
def tokenizer() -> Any:
    return train_tokenizer(generate_modules("train", 40), 400)


def load(name: str = "heldout", corpus: str = "generated", **options: Any) -> list[Prompt]:
    config = PromptsConfig(name=name, **options)
    return load_prompts(config, corpus=corpus, tokenizer=tokenizer(), seed=0)


def ids(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_held_out_prompts_are_beginnings_of_held_out_documents_cut_at_a_token() -> None:
    prompts = load(limit=6, prompt_tokens=20)
    documents = list(generate_modules("heldout", 6))
    assert [prompt.id for prompt in prompts] == [f"generated/heldout/0/{n}" for n in range(6)]
    for prompt, document in zip(prompts, documents, strict=True):
        [turn] = prompt.turns
        assert document.startswith(turn)
        assert ids(turn) == ids(document)[: len(ids(turn))]
        assert 18 <= len(ids(turn)) <= 20


def test_validation_prompts_are_beginnings_of_validation_documents() -> None:
    prompts = load("validation", limit=4, prompt_tokens=20)
    assert [prompt.id for prompt in prompts] == [f"generated/validation/0/{n}" for n in range(4)]
    assert {prompt.category for prompt in prompts} == {"validation"}
    for prompt, document in zip(prompts, generate_modules("validation", 4), strict=True):
        assert document.startswith(prompt.turns[0])
    held_out = {prompt.turns[0] for prompt in load(limit=4, prompt_tokens=20)}
    assert held_out.isdisjoint(prompt.turns[0] for prompt in prompts)


def test_half_of_a_document_at_least_is_left_to_write() -> None:
    for prompt, document in zip(
        load(prompt_tokens=9999), generate_modules("heldout", 32), strict=True
    ):
        assert len(ids(prompt.turns[0])) <= len(ids(document)) // 2


def test_a_cut_never_falls_inside_a_character(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("漢字仮名🙂" * 20 + str(number), "utf-8")
    for count in range(3, 9):  # three bytes are one of these characters
        [prompt] = load(corpus=str(tmp_path), prompt_tokens=count)
        assert "\ufffd" not in prompt.turns[0]
        assert len(ids(prompt.turns[0])) <= count


def test_without_a_limit_the_endless_corpus_gives_thirty_two() -> None:
    assert len({prompt.id for prompt in load()}) == 32


@pytest.mark.parametrize(("name", "corpus"), [("stdlib", "generated"), ("heldout", "stdlib")])
def test_the_standard_librarys_prompts_are_its_held_out_functions(name: str, corpus: str) -> None:
    prompts = load(name, corpus, limit=12, prompt_tokens=64)
    assert len({prompt.id for prompt in prompts}) == 12
    assert {prompt.category for prompt in prompts} == {"stdlib"}
    for prompt in prompts:
        assert prompt.turns[0].startswith(("def ", "async def "))
        assert len(ids(prompt.turns[0])) <= 64


def test_held_out_chats_give_what_the_user_says(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "and?"},
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    [prompt] = load(corpus=str(file))
    assert prompt.turns == ["be\n\nhi", "and?"]


def test_texts_of_ones_own_come_before_any_set() -> None:
    assert load("gone.jsonl", texts=["one", "two"]) == [
        Prompt("text/1", "own", ["one"]),
        Prompt("text/2", "own", ["two"]),
    ]
    with pytest.raises(FalconLabError, match="texts: text 2 is empty"):
        load(texts=["one", "  "])


def test_a_file_in_the_mt_bench_format_is_read_turn_by_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []},
        {"question_id": "x/1", "turns": ["c"]},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert load(str(file)) == [Prompt("81", "writing", ["a", "b"]), Prompt("x/1", "none", ["c"])]
    assert len(load(str(file), limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"turns": ["a"]}', "no 'question_id' among its keys"),
        ('{"question_id": 1}', "no 'turns'"),
        ('{"question_id": 1, "turns": []}', "turns is an empty list"),
        ('{"question_id": 1, "turns": "a"}', "turns is a text"),
        ('{"question_id": 1, "turns": ["a", " "]}', "turn 2 is empty"),
        ('{"question_id": 1, "turns": [2]}', "turn 1 is a number"),
        ('{"question_id": null, "turns": ["a"]}', "question_id is null"),
        ('{"question_id": 0, "turns": ["a"]}', "question_id '0' stands in line 1 already"),
        ('{"question_id": 1, "turns": ["a"]', ".*not whole JSON"),
        ("7", "a JSON object is needed, found a number"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path: Path, line: str, fault: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question_id": 0, "turns": ["a"]}\n' + line)
    with pytest.raises(FalconLabError, match=rf"prompts\.jsonl:2: {fault}"):
        load(str(file))


def test_an_empty_prompt_file_an_unknown_set_and_bad_limits_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    with pytest.raises(FalconLabError, match=r"prompts\.jsonl: the file has no prompt in it"):
        load(str(file))
    with pytest.raises(
        FalconLabError, match="no such file, and none of heldout, validation, stdlib, humaneval"
    ):
        load("humanevil")
    with pytest.raises(FalconLabError, match="limit is 0"):
        load(limit=0)
    with pytest.raises(FalconLabError, match="prompt_tokens must be at least 1"):
        load(prompt_tokens=0)


def test_a_set_of_the_hub_without_the_extra_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FalconLabError, match=r"pip install 'falcon-lab\[data\]'"):
        load("humaneval")


def hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_rows_of_the_hub_become_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        ("openai/openai_humaneval", "test"): [{"task_id": "HumanEval/0", "prompt": "def f"}],
        ("openai/gsm8k", "main", "test"): [{"question": "2+2?", "answer": "4"}],
        ("HuggingFaceH4/mt_bench_prompts", "train"): [
            {"prompt_id": 81, "category": "writing", "prompt": ["a", "b"], "reference": []}
        ],
    }
    hub(monkeypatch, lambda *where, split: data[(*where, split)])
    assert load("humaneval") == [Prompt("HumanEval/0", "humaneval", ["def f"])]
    assert load("gsm8k") == [Prompt("gsm8k/0", "gsm8k", ["2+2?"])]
    assert load("mt_bench") == [Prompt("81", "writing", ["a", "b"])]


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*where: str, split: str) -> None:
        raise ConnectionError("no route\nto host")

    hub(monkeypatch, offline)
    with pytest.raises(FalconLabError, match=r"openai/gsm8k .*ConnectionError: no route\).*JSONL"):
        load("gsm8k")
