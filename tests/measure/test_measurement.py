"""The paired measurement, with engines of prescribed answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from falcon_lab.config.schema import EvaluationConfig
from falcon_lab.decoding.generation import Generation, Round, Seconds
from falcon_lab.decoding.rounding import Reading
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.measurement import measure
from measuring import ChatLetters, Letters, Scripted, prompt

STOP = StopCondition()
QUIET: Callable[[int, int, str], None] = lambda done, total, method: None  # noqa: E731


def config(**changes: Any) -> EvaluationConfig:
    return EvaluationConfig(**{"repeats": 1, "warmup": 0, "max_new_tokens": 8, **changes})


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_everyone_answers_a_prompt_before_the_next_and_who_goes_first_moves_on() -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Scripted([65], log=log, name=name) for name in ("plain", "chain", "tree")}
    prompts = [prompt("0", "a"), prompt("1", "b")]
    measure(engines, prompts, config(repeats=2), stop=STOP, on_progress=QUIET)
    order = ["plain", "chain", "tree"]
    expected = []
    for repeat in range(2):
        for place, text in enumerate("ab"):
            first = (repeat + place) % 3
            expected += [(name, text) for name in order[first:] + order[:first]]
    assert log == expected


def test_warm_up_answers_are_not_measured() -> None:
    plain = Scripted([65])
    found = measure(
        {"plain": plain}, [prompt("0", "a")], config(warmup=3), stop=STOP, on_progress=QUIET
    )
    assert len(plain.prompts) == 2  # there is one prompt to warm up with
    assert found.warmup == 1
    assert len(found.records["plain"][0].wall_repeats) == 1


def test_plain_comes_first_hugging_face_second_and_the_rest_as_they_came() -> None:
    engines = {"tree": Scripted([65]), "plain": Scripted([65]), "chain": Scripted([65])}
    found = measure(
        engines, [prompt("0", "a")], config(), stop=STOP, hf=Scripted([65]), on_progress=QUIET
    )
    assert list(found.records) == ["plain", "HF generate", "tree", "chain"]


class Clocked(Scripted):
    """Takes as many seconds as its script says, on a clock of its own."""

    def __init__(self, walls: list[float], now: list[float]) -> None:
        super().__init__([65, 66])
        self.walls, self.now = list(walls), now

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        wall = self.walls.pop(0)
        self.now[0] += wall
        self.seconds = Seconds(prefill=wall / 4, verify=3 * wall / 4, total=3 * wall / 4)
        return super().generate(*args, **kwargs)


@pytest.mark.parametrize(
    ("walls", "median"), [([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0), ([5.0], 5.0)]
)
def test_the_median_repeat_counts_with_its_own_times(
    walls: list[float], median: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    found = measure(
        {"plain": Clocked(walls, now)},
        [prompt("0", "a")],
        config(repeats=len(walls)),
        stop=STOP,
        on_progress=QUIET,
    )
    [one] = found.records["plain"]
    assert one.wall_repeats == walls
    assert one.times.wall == median
    assert one.times.prefill == median / 4
    assert one.times.decode == one.times.verify == 3 * median / 4


def test_a_row_holds_what_the_engine_did() -> None:
    rounds = [Round(nodes=6, depth=3, passes=2, accepted=2, emitted=3)]
    seconds = Seconds(0.5, 0.1, 0.2, 0.03, 0.04, 0.05)
    engine = Scripted([65, 66, 67], rounds=rounds, seconds=seconds, lossless=False)
    found = measure({"tree": engine}, [prompt("0", "ab")], config(), stop=STOP, on_progress=QUIET)
    [one] = found.records["tree"]
    [turn] = one.turns
    assert (turn.prompt_tokens, turn.tokens, turn.text) == (2, [65, 66, 67], "ABC")
    assert (turn.rounds.nodes, turn.rounds.passes, turn.rounds.emitted) == ([6], [2], [3])
    assert (turn.times.draft, turn.times.commit) == (0.1, 0.04)
    assert one.identical is None  # there is no plain decoding to hold it against
    assert found.lossless == {"tree": False}


def test_output_is_held_against_plain_decodings_and_the_margin_asked_for() -> None:
    read: list[list[int]] = []

    def again(before: torch.Tensor, tokens: Sequence[int]) -> Reading:
        read.append([*before.tolist(), *tokens])
        scores = torch.zeros(4, 128)
        scores[1, ord("B")], scores[1, ord("X")] = 2.0, 1.5
        return Reading(scores, None)

    engines = {
        "plain": Scripted(letters("ABC")),
        "same": Scripted(letters("ABC")),
        "other": Scripted(letters("AXC")),
        "short": Scripted(letters("A")),
    }
    found = measure(
        engines, [prompt("0", "ab")], config(), stop=STOP, read=again, on_progress=QUIET
    )
    [same], [other], [short] = (found.records[name] for name in ("same", "other", "short"))
    assert found.records["plain"][0].identical is None
    assert (same.identical, same.difference_position, same.margin) == (True, None, None)
    assert (other.identical, other.difference_turn, other.difference_position) == (False, 0, 1)
    assert other.margin == pytest.approx(0.5)
    assert (short.identical, short.difference_position) == (False, 1)
    assert short.margin == pytest.approx(0.5)  # between the two best: the answer had ended
    assert read == [letters("abABC")]  # once, though two have left it


def test_every_method_goes_on_from_its_own_answer() -> None:
    engines = {"plain": Scripted(letters("X")), "tree": Scripted(letters("Y"))}
    found = measure(engines, [prompt("0", "a", "b")], config(), stop=STOP, on_progress=QUIET)
    assert engines["plain"].prompts == [letters("a"), letters("aXb")]
    assert engines["tree"].prompts == [letters("a"), letters("aYb")]
    [one] = found.records["tree"]
    assert [turn.prompt_tokens for turn in one.turns] == [1, 3]
    assert (one.difference_turn, one.difference_position) == (0, 0)


def test_a_difference_in_a_later_turn_is_found_there() -> None:
    class Second(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Generation:
            self.answer = letters("XZ") if len(self.prompts) == 1 else letters("XY")
            return super().generate(*args, **kwargs)

    seen: list[list[int]] = []

    def again(before: torch.Tensor, tokens: Sequence[int]) -> Reading:
        seen.append([*before.tolist(), *tokens])
        return Reading(torch.arange(128.0).expand(3, -1), None)

    engines = {"plain": Scripted(letters("XY")), "tree": Second([])}
    chat = prompt("0", "a", "b", tokenizer=ChatLetters(), chat=True)
    found = measure(engines, [chat], config(), stop=STOP, read=again, on_progress=QUIET)
    [one] = found.records["tree"]
    assert (one.difference_turn, one.difference_position) == (1, 1)
    assert seen == [letters("<u>a<a>XY<u>b<a>XY")]
    assert one.margin == -1.0


def test_the_seed_depends_on_the_prompt_alone() -> None:
    engines = {"plain": Scripted([65]), "tree": Scripted([65])}
    prompts = [prompt("0", "a"), prompt("1", "b")]
    measure(engines, prompts, config(repeats=2, seed=5), stop=STOP, on_progress=QUIET)
    assert engines["plain"].seeds == engines["tree"].seeds
    first, second = engines["plain"].seeds[:2]
    assert first != second
    assert engines["plain"].seeds == [first, second] * 2


def test_sampled_output_is_not_held_against_plain_decodings() -> None:
    engines = {"plain": Scripted([65]), "tree": Scripted([66])}
    found = measure(
        engines, [prompt("0", "a")], config(temperature=1.0), stop=STOP, on_progress=QUIET
    )
    assert found.records["tree"][0].identical is None


def test_repeats_that_write_different_tokens_are_noticed() -> None:
    class Fickle(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Generation:
            self.answer = [65 + len(self.prompts)]
            return super().generate(*args, **kwargs)

    engines = {"plain": Scripted([65]), "tree": Fickle([])}
    found = measure(engines, [prompt("0", "a")], config(repeats=2), stop=STOP, on_progress=QUIET)
    assert found.records["plain"][0].repeats_agree
    assert not found.records["tree"][0].repeats_agree


def test_threads_are_set_for_the_measurement_and_put_back_even_after_an_error() -> None:
    class Broken(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Generation:
            super().generate(*args, **kwargs)
            raise RuntimeError("out of order")

    before = torch.get_num_threads()
    engine = Broken([65])
    with pytest.raises(RuntimeError, match="out of order"):
        measure(
            {"plain": engine},
            [prompt("0", "a")],
            config(threads=before + 1),
            stop=STOP,
            on_progress=QUIET,
        )
    assert engine.threads == [before + 1]
    assert torch.get_num_threads() == before


def test_progress_is_reported_answer_by_answer() -> None:
    seen: list[tuple[int, int, str]] = []
    measure(
        {"plain": Scripted([65]), "tree": Scripted([65])},
        [prompt("0", "a")],
        config(repeats=2, warmup=1),
        stop=STOP,
        on_progress=lambda *report: seen.append(report),
    )
    names = ["plain", "tree", "plain", "tree", "tree", "plain"]
    assert seen == [(done, 6, name) for done, name in enumerate(names)]


def test_without_a_callback_there_is_a_progress_bar_that_reaches_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure({"plain": Scripted([65])}, [prompt("0", "a")], config(repeats=3), stop=STOP)
    assert "evaluate: 100%" in capsys.readouterr().err


def test_what_a_stop_string_cuts_off_is_not_in_the_answers_text() -> None:
    stop = StopCondition(strings=["#"], tokenizer=Letters())
    found = measure(
        {"plain": Scripted(letters("AB#"))},
        [prompt("0", "a")],
        config(),
        stop=stop,
        on_progress=QUIET,
    )
    [turn] = found.records["plain"][0].turns
    assert (turn.text, turn.tokens) == ("AB", letters("AB#"))


def test_no_prompts_are_an_error_that_names_the_key() -> None:
    with pytest.raises(FalconLabError, match=r"evaluation\.prompts"):
        measure({"plain": Scripted([65])}, [], config(), stop=STOP)


class Stops(Scripted):
    """Answers so often, then breaks."""

    left = 3

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().generate(*args, **kwargs)


def test_a_measurement_that_was_interrupted_goes_on_with_the_prompt_that_it_was_at(
    tmp_path: Path,
) -> None:
    path = tmp_path / "answers.jsonl"
    log: list[tuple[str, str]] = []
    prompts = [prompt(str(n), letter) for n, letter in enumerate("abc")]
    settings: dict[str, Any] = {"stop": STOP, "on_progress": QUIET}
    broken = {"plain": Scripted([65]), "tree": Stops([66])}
    with pytest.raises(KeyboardInterrupt):  # its fourth answer is to a in the second pass
        measure(broken, prompts, config(repeats=2), **settings, journal=Journal(path))
    engines = {name: Scripted([65], log=log, name=name) for name in ("plain", "tree")}
    found = measure(
        engines, prompts, config(repeats=2, warmup=1), **settings, journal=Journal(path)
    )
    order = [("plain", "a"), ("tree", "a")]  # the warm-up
    order += [("tree", "a"), ("plain", "a")]  # turns as they would have been
    order += [("plain", "b"), ("tree", "b"), ("tree", "c"), ("plain", "c")]
    assert log == order
    assert [len(row.wall_repeats) for row in found.records["tree"]] == [2, 2, 2]
    assert found.records["tree"][0].turns[0].tokens in ([65], [66])


def test_a_method_that_is_warm_needs_no_warm_up(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    engines = {name: Scripted([65], log=log, name=name) for name in ("plain", "tree")}
    prompts = [prompt("0", "a")]
    settings: dict[str, Any] = {"stop": STOP, "on_progress": QUIET}
    measure(engines, prompts, config(warmup=1), **settings, warm={"plain"})
    assert log == [("tree", "a"), ("plain", "a"), ("tree", "a")]


def test_a_finished_measurement_is_read_and_nothing_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    prompts = [prompt("0", "a")]
    first = measure(
        {"plain": Scripted([65])}, prompts, config(warmup=1), stop=STOP, journal=Journal(path)
    )
    capsys.readouterr()
    idle = Scripted([66])
    again = measure({"plain": idle}, prompts, config(warmup=1), stop=STOP, journal=Journal(path))
    assert idle.prompts == []
    assert again.records == first.records
    assert capsys.readouterr().err == ""
