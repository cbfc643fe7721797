"""Chats: what was said is remembered, forgotten, stopped and bounded."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from chat_targets import chat_target, save_chat_target
from falcon_lab.cli import main
from falcon_lab.commands.answering import Answering
from falcon_lab.commands.chat import Chat, talk
from falcon_lab.commands.decode import says_length
from falcon_lab.commands.signals import interrupts_noted
from falcon_lab.config.load import load_experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import EncodedPrompt, conversation
from falcon_lab.measure.engines import Setup
from falcon_lab.plugins.discovery import load_components
from running import refused
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


def call(folder: Path, *words: str, said: str = "") -> Result:
    common = ["generate", "--target", str(folder), "--max-new-tokens=24", "--temperature=0.4"]
    result = CliRunner().invoke(main, [*common, *words], input=said)
    assert result.exit_code == 0, result.output
    return result


class Remembered(Answering):
    """Answers with given tokens, and keeps what it was asked."""

    def __init__(self, *answers: list[int]) -> None:
        self.asked: list[tuple[tuple[str, ...], list[list[int]]]] = []
        self._given = list(answers)

    def answer(
        self,
        prompt: EncodedPrompt,
        answers: Sequence[Sequence[int]] = (),
        stopped: Callable[[], bool] = bool,
    ) -> list[int]:
        prompt.tokens(answers)
        self.asked.append((prompt.turns, [list(one) for one in answers]))
        return self._given.pop(0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], False),
        (["evaluation.top_k=3"], False),
        (["evaluation={top_k: 3}"], False),
        (["evaluation.max_new_tokens=6"], True),
        (["evaluation={max_new_tokens: 6}"], True),
    ],
)
def test_a_length_that_the_user_gives_is_known(given: list[str], says: bool) -> None:
    assert says_length(given) == says


def test_a_turn_a_line_is_answered_with_what_was_said(folder: Path) -> None:
    first, fresh = (call(folder, "--prompt", turn).stdout for turn in ("ab", "cd"))
    both = call(folder, "--chat", said="ab\n\ncd\n").stdout
    assert both.startswith(first)
    assert both != first + fresh
    assert call(folder, "--chat", said="ab\ncd\n/clear\nab\n").stdout == both + first
    assert call(folder, "--prompt=ab", "--chat", said="cd\n/quit\nab\n").stdout == both


def test_history_is_what_both_have_said() -> None:
    answering = Remembered([4, 5], [6], [7])
    chat = Chat(answering, conversation(chat_target()), 8)
    for turn in ("ab", "cd"):
        chat.say(turn)
    chat.clear()
    chat.say("ef")
    assert answering.asked == [(("ab",), []), (("ab", "cd"), [[4, 5]]), (("ef",), [])]


def test_a_full_context_loses_its_oldest_turns(capsys: pytest.CaptureFixture[str]) -> None:
    target = chat_target()
    answering = Remembered(*[[4] * 20 for _ in range(20)])
    chat = Chat(answering, conversation(target), 32)
    for _ in range(20):
        chat.say("a" * 20)
    turns, answers = answering.asked[-1]
    assert len(turns) == len(answers) + 1 < 20
    assert "oldest turn is forgotten" in capsys.readouterr().err


def test_a_turn_without_room_is_refused_and_forgotten() -> None:
    answering = Remembered([4], [5])
    chat = Chat(answering, conversation(chat_target()), 8)
    chat.say("ab")
    with pytest.raises(FalconLabError, match="the target reads 256 with the answer"):
        chat.say("a" * 300)
    chat.say("cd")
    assert answering.asked[-1] == (("ab", "cd"), [[4]])


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_was_said() -> None:
    overrides = ["evaluation.max_new_tokens=6", "evaluation.temperature=1"]
    experiment = load_experiment(None, overrides)
    setup = Setup.of(experiment, chat_target(), load_components(), print)
    answering, prompt = Answering(setup, color=False), conversation(setup.target, None, "ab")
    whole = answering.answer(prompt)
    assert answering.answer(prompt, stopped=lambda: True) == whole[:1]
    assert answering.answer(prompt) == whole


def test_ctrl_c_is_noted_inside_an_answer_alone() -> None:
    def ended(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGINT, ended)
    try:
        with interrupts_noted() as interrupted:
            assert not interrupted()
            signal.raise_signal(signal.SIGINT)
            assert interrupted()
        with pytest.raises(InterruptedError):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal(io.StringIO):
    """What is typed."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_what_is_wrong_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering = Remembered([4], [5])
    long = "a" * 300
    for terminal in (True, False):
        typed = f"{long}\nab\n"
        monkeypatch.setattr("sys.stdin", Terminal(typed) if terminal else io.StringIO(typed))
        chat = Chat(answering, conversation(chat_target()), 8)
        if terminal:
            talk(chat, None)
            said = capsys.readouterr().err
            assert "/clear forgets" in said
            assert said.count(">>> ") == 3
            assert said.count("falcon-lab: ") == 1
        else:
            with pytest.raises(FalconLabError):
                talk(chat, None)
    assert len(answering.asked) == 1


def test_a_terminal_chats_where_no_prompt_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("ab\n"))
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--target", str(folder), "--max-new-tokens=24", "--temperature=0.4"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == call(folder, "--prompt", "ab").stdout


def test_a_system_message_stands_before_the_first_turn(folder: Path) -> None:
    told = conversation(chat_target(), "cd", "ab")
    assert told.tokenizer.decode(told.tokens([])).startswith("scd<eos>uab")
    assert call(folder, "--system=xy", "--prompt=ab").stdout.strip("\n")


def test_system_messages_and_chats_need_a_template_that_has_them(
    folder: Path, tmp_path: Path
) -> None:
    plain = ("generate", "--target", str(save_tiny(tmp_path / "plain")), "--prompt=a")
    assert "no chat template" in refused(*plain, "--chat")
    assert "no chat template" in refused(*plain, "--system=x")
    target = chat_target()
    target.tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(FalconLabError, match="leaves a system message out"):
        conversation(target, "x")
