"""Dialogues that a tiny chat target writes itself."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chat_targets import chat_target
from fakes.completions import serving
from falcon_lab.data.corpora import corpus
from falcon_lab.data.dialogue_card import Card, card_path, refuse_other_author
from falcon_lab.data.dialogue_rules import KeptOut, is_looping, words
from falcon_lab.data.dialogues import (
    ChatForm,
    Dialogist,
    DialogueSettings,
    open_card,
    read_questions,
    write_dialogues,
)
from falcon_lab.data.documents import PLAIN, read_documents
from falcon_lab.data.encoding import encode
from falcon_lab.decoding.served import ServedEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.model.target import Target
from tiny_models import tiny_target

SHORT = DialogueSettings(
    sampled=1.0, question_tokens=40, answer_tokens=30, batch_size=8, part=10, given=0.5
)


class Stopped(Exception):
    """Stands for whatever ends a process."""


def write(
    path: Path,
    tokens: int = 150,
    *,
    settings: DialogueSettings = SHORT,
    target: Target | None = None,
    questions: Sequence[str] = (),
    kept_out: KeptOut | None = None,
    texts: int = 10**9,
) -> Card:
    """Write a file; ``Stopped`` comes after so many answers."""
    left = [texts]

    def count(_: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped

    target = target or chat_target()
    dialogist = Dialogist(target, ChatForm.of(target), settings, questions, kept_out)
    card = open_card(path, dialogist)
    return write_dialogues(path, dialogist, card, tokens, count, lambda card: None)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def everything(path: Path) -> tuple[bytes, dict[str, Any]]:
    """What is in a file and on its card, but for the time that it took."""
    card = json.loads(card_path(path).read_text())
    del card["seconds"]
    return path.read_bytes(), card


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    first, again, other = (tmp_path / f"{name}.jsonl" for name in "abc")
    card = write(first)
    write(again)
    write(other, settings=replace(SHORT, seed=1))
    assert everything(first) == everything(again)
    assert first.read_bytes() != other.read_bytes()
    assert card.answer_tokens >= 150
    assert card.dialogues == len(lines_of(first)) > 5


@pytest.mark.parametrize("texts", [0, 4, 9])
def test_a_file_that_was_stopped_anywhere_ends_as_an_undisturbed_one(
    tmp_path: Path, texts: int
) -> None:
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    write(whole)
    with pytest.raises(Stopped):
        write(stopped, texts=texts)
    before = stopped.read_bytes()
    assert whole.read_bytes().startswith(before)
    write(stopped)
    assert everything(stopped) == everything(whole)


@pytest.mark.parametrize(("ending", "torn"), [(".jsonl", 20), (".jsonl", 9999), (".jsonl.gz", 20)])
def test_a_part_that_was_torn_while_it_was_appended_is_written_anew(
    tmp_path: Path, ending: str, torn: int
) -> None:
    whole, half = tmp_path / f"whole{ending}", tmp_path / f"half{ending}"
    write(whole, 250)
    card = write(half, 100)
    assert card.bytes == len(half.read_bytes()) < len(whole.read_bytes())
    half.write_bytes(whole.read_bytes()[: card.bytes + torn])
    write(half, 250)
    assert everything(half) == everything(whole)


def test_a_file_is_continued_where_more_tokens_are_wanted(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first = write(path, 40)
    begun = path.read_bytes()
    second = write(path, 250)
    write(whole, 250)
    assert path.read_bytes().startswith(begun)
    assert first.answer_tokens < 250 <= second.answer_tokens
    assert everything(path) == everything(whole)
    unchanged = path.read_bytes()
    write(path, 10, texts=0)
    assert path.read_bytes() == unchanged


@pytest.mark.parametrize("batch_size", [1, 3])
def test_how_many_texts_are_side_by_side_does_not_change_them(
    tmp_path: Path, batch_size: int
) -> None:
    eight, other = tmp_path / "eight.jsonl", tmp_path / "other.jsonl"
    write(eight, 60)
    write(other, 60, settings=replace(SHORT, batch_size=batch_size))
    assert eight.read_bytes() == other.read_bytes()


def test_a_dialogue_is_what_the_target_writes_alone(tmp_path: Path) -> None:
    target = chat_target()
    write(
        tmp_path / "a.jsonl",
        300,
        settings=replace(SHORT, sampled=0.0, answer_tokens=12),
        target=target,
    )
    for line in lines_of(tmp_path / "a.jsonl"):
        question, answer = (message["content"] for message in line["messages"])
        prompt = target.tokenizer(f"u{question}<eos>a", add_special_tokens=False)["input_ids"]
        texts = target.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        said = target.tokenizer.decode(texts[0, len(prompt) :], skip_special_tokens=True)
        assert said.strip() == answer
        assert line["tokens"][1] == texts.shape[1] - len(prompt)


def test_loops_duplicates_and_broken_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    card = write(
        path, 400, settings=replace(SHORT, sampled=0.5, answer_tokens=60, part=24, batch_size=16)
    )
    target, lines = chat_target(), lines_of(path)
    assert card.dropped["looping"] > 0
    assert card.dropped["broken"] > 0
    for line in lines:
        tokens = target.tokenizer(line["messages"][1]["content"])["input_ids"]
        assert not is_looping(tokens)
        assert not set(tokens) & {0, 1}
    for place in (0, 1):
        texts = [" ".join(words(line["messages"][place]["content"])) for line in lines]
        assert len(set(texts)) == len(texts)
        assert all(texts)


def test_given_questions_are_mixed_in_once_each_and_duplicates_dropped(tmp_path: Path) -> None:
    given = [f"a question {'abcdefghijklmnopqrst'[n]} of mine" for n in range(20)]
    given.append("a question a of mine")
    path = tmp_path / "a.jsonl"
    card = write(path, 800, questions=given)
    asked = [line["messages"][0]["content"] for line in lines_of(path) if line["given"]]
    assert 3 <= len(asked) == len(set(asked)) <= 20
    assert set(asked) <= set(given)
    assert any(not line["given"] for line in lines_of(path))
    assert card.counts["given"] == len(asked)
    early = [line["given"] for line in lines_of(path) if line["id"] < 12]
    assert any(early)


def test_all_answers_but_a_share_are_greedy(tmp_path: Path) -> None:
    card = write(tmp_path / "a.jsonl", 200, settings=replace(SHORT, sampled=0.5, answer_tokens=14))
    assert card.counts["greedy"] > 2 < card.counts["sampled"]


PLANTED = "a b c d e f g h i j k l m n o p"


def test_a_prompt_of_an_evaluation_is_dropped_and_reported(tmp_path: Path) -> None:
    out = KeptOut.of({"mine.jsonl": [f"x {PLANTED} y"]})
    others = [f"a b c d e f g {letter}" for letter in "hijklmnopq"]
    given = [f"t {PLANTED} t", *others]
    path = tmp_path / "a.jsonl"
    card = write(path, 200, questions=given, kept_out=out, settings=replace(SHORT, given=1.0))
    asked = [line["messages"][0]["content"] for line in lines_of(path)]
    assert given[0] not in asked
    assert set(others) & set(asked)
    assert card.dropped["overlap"] == 1
    assert card.kept_out == {"mine.jsonl": 1}
    (shown,) = card.overlaps
    assert shown["set"] == "mine.jsonl"
    assert shown["words"] in PLANTED


def test_what_a_message_shares_with_a_prompt_is_found_by_words() -> None:
    out = KeptOut.of({"s": ["Hello, big wide world today!", "Go on"]})
    assert out.hit("he said hello big WIDE world: today, and left") is not None
    assert out.hit("hello big wide world tomorrow") is None
    assert out.hit("go on") is not None
    assert out.hit("go on with it") is None


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([], False),
        (list(range(200)), False),
        ([1, 2, 3] * 10, True),
        ([1] * 12, False),
        ([1] * 40, True),
        ([*range(200), *[1, 2, 3] * 40], True),
        ([*[1, 2, 3] * 40, *range(200)], False),
    ],
)
def test_a_text_loops_where_few_of_its_last_grams_are_distinct(
    tokens: list[int], loops: bool
) -> None:
    assert is_looping(tokens) is loops


def test_what_was_written_is_a_corpus_with_the_answers_in_the_loss(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    write(plain), write(packed)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    target = chat_target()
    found = [list(corpus(str(path), split="train")) for path in (plain, packed)]
    assert [d.messages for d in found[0]] != []
    assert sorted(str(d.messages) for d in read_documents(plain, "a")) == sorted(
        str(d.messages) for d in read_documents(packed, "a")
    )
    for document in found[1]:
        encoded = encode(document, target.tokenizer)
        told = [t for t, counts in zip(encoded.tokens, encoded.loss_mask, strict=True) if counts]
        assert document.messages is not None
        assert target.tokenizer.decode(told) == document.messages[1]["content"] + "<eos>"


def test_a_compressed_file_that_is_none_or_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    write(path)
    for damaged in (path.read_bytes()[:-9], b"no gzip at all", path.read_bytes()[:40]):
        path.write_bytes(damaged)
        with pytest.raises(FalconLabError, match=r"a\.jsonl\.gz"):
            list(read_documents(path, "a"))


@pytest.mark.parametrize(
    ("change", "told"),
    [({"temperature": 0.5}, "temperature=1.0"), ({"answer_tokens": 31}, "answer_tokens=30")],
)
def test_a_file_is_not_continued_under_other_settings(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = tmp_path / "a.jsonl"
    write(path, 40)
    before = everything(path)
    with pytest.raises(FalconLabError, match=told):
        write(path, 80, settings=replace(SHORT, **change))
    assert everything(path) == before


def test_a_file_of_another_target_a_strangers_and_a_shorter_one_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    write(path, 40)
    with pytest.raises(FalconLabError, match="fingerprint"):
        write(path, 80, target=chat_target(seed=1))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FalconLabError, match="its end is lost"):
        write(path, 80)
    card_path(path).unlink()
    with pytest.raises(FalconLabError, match="is there already"):
        write(path, 80)


def test_dialogues_of_another_target_are_no_training_data(tmp_path: Path) -> None:
    path, target = tmp_path / "a.jsonl", chat_target()
    write(path, 40)
    other = chat_target(seed=1)
    refuse_other_author(str(path), target)
    refuse_other_author("generated", other)
    for name in (path, tmp_path):
        with pytest.raises(FalconLabError, match=f"{target.fingerprint}.*{other.fingerprint}"):
            refuse_other_author(str(name), other)
    card_path(path).unlink()
    refuse_other_author(str(path), other)


def test_a_target_without_a_chat_template_or_that_hides_the_user_is_refused() -> None:
    with pytest.raises(FalconLabError, match="no chat template"):
        ChatForm.of(tiny_target())
    for template in (
        "nothing",
        "{{ messages[0]['content'] }}",
        "u{{ messages[0]['content'][:0] }}",
    ):
        with pytest.raises(FalconLabError, match="chat template"):
            ChatForm.of(tiny_target(), template)


def test_a_template_without_an_end_token_ends_a_question_by_its_own_words() -> None:
    target = tiny_target(vocab=128)
    form = ChatForm.of(target, PLAIN)
    assert target.tokenizer.decode(form.header) == "### User\n"
    assert form.closing == "### Assistant"
    assert not ChatForm.of(chat_target()).closing


def test_a_target_that_writes_nothing_of_use_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match="no dialogue is left"):
        write(tmp_path / "a.jsonl", settings=replace(SHORT, question_tokens=1))


def test_questions_are_texts_or_what_the_user_says_first(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    chat = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}]}
    path.write_text(json.dumps(chat) + "\n" + json.dumps({"text": "two"}) + "\n")
    assert read_questions(path) == ["one", "two"]
    path.write_text('{"text": "?"}\n')
    with pytest.raises(FalconLabError, match=r"q\.jsonl"):
        read_questions(path)


@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_an_answer_begins_when_its_question_is_there_and_takes_its_place(
    tmp_path: Path, batch_size: int
) -> None:
    """The target reads of its prompt what it has not written itself; a part never waits."""
    target, read, side_by_side = chat_target(), [], []
    reading, stepping = target.read, target.step_batch

    def noted(prompt: Any, *rest: Any, **named: Any) -> Any:
        read.append(len(prompt))
        return reading(prompt, *rest, **named)

    def counted(tokens: Any, *rest: Any, **named: Any) -> Any:
        side_by_side.append(len(tokens))
        return stepping(tokens, *rest, **named)

    target.read, target.step_batch = noted, counted  # type: ignore[method-assign]
    settings = replace(SHORT, sampled=0.5, part=16, batch_size=batch_size)
    dialogist = Dialogist(target, ChatForm.of(target), settings)
    made = dialogist.part(0, (), lambda tokens: None)
    assert made.lines
    # A header or what closes a question is read, and never a question.
    assert max(read) <= 4
    fewer = next(place for place, count in enumerate(side_by_side) if count < batch_size)
    assert side_by_side[fewer:] == sorted(side_by_side[fewer:], reverse=True)


def test_of_equal_questions_the_one_of_the_smallest_number_stays() -> None:
    """Whichever is there first, which is another one in another batch."""
    target, made = chat_target(seed=7), []
    for batch_size in (1, 5, 16):
        settings = replace(SHORT, temperature=0.01, part=16, batch_size=batch_size, answer_tokens=4)
        dialogist = Dialogist(target, ChatForm.of(target), settings)
        part = dialogist.part(0, (), lambda tokens: None)
        assert part.lines
        assert part.dropped["duplicate"] > 2
        made.append((part.lines, part.dropped))
    assert made[0] == made[1] == made[2]


def test_a_server_writes_what_the_target_writes_and_a_file_is_continued_by_it_alone(
    tmp_path: Path,
) -> None:
    questions = [f"{first}{second}" for first in "bcdefgh" for second in "klmnop"]

    def lines(name: str, settings: DialogueSettings, concurrency: int = 0) -> list[dict[str, Any]]:
        target, path = chat_target(), tmp_path / name
        engine = ServedEngine(target, served.config(concurrency=concurrency))
        dialogist = Dialogist(
            target, ChatForm.of(target), settings, questions, None, engine if concurrency else None
        )
        dialogist.check()
        write_dialogues(path, dialogist, open_card(path, dialogist), 30, int, repr)
        return lines_of(path)

    greedy, sampled = replace(SHORT, given=1.0, sampled=0.0), SHORT
    with serving(chat_target(), max_model_len=chat_target().max_positions) as served:
        assert lines("there.jsonl", greedy, 4) == lines("here.jsonl", greedy)
        assert lines("one.jsonl", sampled, 1) == lines("four.jsonl", sampled, 4)
        with pytest.raises(FalconLabError, match="server"):
            lines("here.jsonl", greedy, 4)
