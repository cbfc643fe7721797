"""A server in the target's place: the same texts, whatever happens on the way."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch

from fakes.completions import WAIT, Served, cut, hang_up, refused, said, serving, until
from falcon_lab.config.schema import ServerConfig
from falcon_lab.decoding.plain import PlainEngine, continue_texts
from falcon_lab.decoding.round import DecodedSequence
from falcon_lab.decoding.served import ServedEngine
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.errors import FalconLabError
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.serving.client import Server
from tiny_models import tiny_target

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14], [3, 4, 5, 6, 7], [40, 41]]
LENGTH = 20


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab=300)


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    return written(target)


def written(target: Target, config: ServerConfig | None = None) -> list[list[int]]:
    engine = None if config is None else ServedEngine(target, config)
    return [text for _, text in sorted(continue_texts(target, PROMPTS, LENGTH, engine=engine))]


def refusal(target: Target, config: ServerConfig) -> str:
    with pytest.raises(FalconLabError) as found:
        written(target, config)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_writes_what_the_target_writes_token_for_token(
    target: Target, expected: list[list[int]], concurrency: int
) -> None:
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    with serving(target) as served:
        assert written(target, served.config(concurrency=concurrency)) == expected
        assert served.most <= concurrency
        assert served.paths == ["/v1/models"]
    texts = [request for request in served.requests if request["prompt"] in PROMPTS]
    assert sorted(request["prompt"] for request in texts) == sorted(PROMPTS)
    assert all(request["repetition_penalty"] == 1 for request in texts)


def test_texts_end_with_the_end_token_of_the_target_whether_it_is_shown_or_not() -> None:
    target = tiny_target(vocab=300)
    free = written(target)
    target.eos_ids = frozenset({free[1][4]})
    expected = written(target)
    assert any(len(text) < LENGTH for text in expected)

    def hidden(served: Served, body: dict[str, Any]) -> dict[str, Any]:
        found = Served.complete(served, body)
        choice = found["choices"][0]
        if choice["finish_reason"] == "stop":
            choice["token_ids"] = choice["token_ids"][:-1]
        return found

    with serving(target) as served:
        assert written(target, served.config()) == expected
        served.complete = lambda body: hidden(served, body)  # type: ignore[method-assign]
        assert written(target, served.config()) == expected


def test_many_requests_are_in_flight_and_no_more_than_are_allowed(
    target: Target, expected: list[list[int]]
) -> None:
    with serving(target) as served:
        engine = ServedEngine(target, served.config(concurrency=3))
        engine.check(LENGTH)
        assert served.opened.acquire(timeout=WAIT)  # the probe
        served.gate.clear()
        found: list[tuple[int, list[int]]] = []

        def write() -> None:
            found.extend(continue_texts(target, PROMPTS, LENGTH, engine=engine))

        thread = threading.Thread(target=write)
        thread.start()
        assert all(served.opened.acquire(timeout=WAIT) for _ in range(3))
        served.gate.set()
        thread.join()
    assert served.most == 3
    assert [text for _, text in sorted(found)] == expected


@pytest.mark.parametrize(
    "fault", [cut, hang_up, refused(429), refused(503), refused(500)], ids=lambda f: f.__name__
)
def test_a_request_that_came_to_nothing_is_sent_again(
    target: Target, expected: list[list[int]], fault: Any
) -> None:
    with serving(target) as served:
        engine = ServedEngine(target, served.config(concurrency=2))
        engine.check(LENGTH)
        served.faults += [fault, fault]
        before = len(served.requests)
        found = sorted(continue_texts(target, PROMPTS, LENGTH, engine=engine))
    assert [text for _, text in found] == expected
    assert len(served.requests) - before == len(PROMPTS) + 2


def test_a_slow_answer_is_given_up_and_asked_for_again(target: Target) -> None:
    request = {"model": "tiny", "prompt": [3, 4], "max_tokens": 2, "temperature": 0.0}
    released = threading.Event()
    with serving(target) as served:
        served.faults.append(until(released))
        with pytest.raises(FalconLabError, match=r"0\.1 s in 1 tries.*data\.server\.timeout"):
            Server(served.config(timeout=0.1, retries=0)).complete(request)
        served.faults.append(until(released))
        patient = Server(served.config(timeout=0.3, retries=30))  # a busy machine is slow too
        assert patient.complete(request) == Server(served.config()).complete(request)
        assert len(served.requests) >= 4
        released.set()


def test_a_server_is_left_alone_for_as_long_as_it_asks(target: Target) -> None:
    with serving(target) as served:
        engine = ServedEngine(target, served.config())
        engine.check(LENGTH)
        served.faults.append(refused(429, Retry_After="1"))
        began = time.monotonic()
        assert len(list(continue_texts(target, PROMPTS[:1], LENGTH, engine=engine))) == 1
        assert time.monotonic() - began >= 1


def test_a_server_that_only_takes_and_gives_text_is_enough(target: Target) -> None:
    with serving(target, takes_ids=False, gives_ids=False, tokenizes=False) as served:
        tokenizer = target.tokenizer
        prompt = tokenizer("a b c", add_special_tokens=False)["input_ids"]
        engine = ServedEngine(target, served.config())
        ((_, text),) = continue_texts(target, [prompt], LENGTH, engine=engine)
        assert text[: len(prompt)] == prompt
        assert isinstance(served.requests[-1]["prompt"], str)


def test_sampled_texts_depend_on_their_own_seed_alone(target: Target) -> None:
    def texts(engine: Any) -> dict[int, list[int]]:
        waiting = deque[DecodedSequence]()
        for number, prompt in enumerate(PROMPTS):
            transcript = begin(prompt, 6, target.max_positions, StopCondition(target.eos_ids))
            draws = torch.Generator().manual_seed(number)
            sequence = (number, torch.tensor(prompt), transcript, Sampling(1.0), draws)
            waiting.append(DecodedSequence(*sequence))
        return {one.number: one.transcript.tokens for one in engine.decode(waiting, 4)}

    with serving(target) as served:
        first = texts(ServedEngine(target, served.config(concurrency=4)))
        assert first == texts(ServedEngine(target, served.config(concurrency=1)))
    assert first == texts(PlainEngine(target))


# --- refusals -----------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named_with_what_to_do(target: Target) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        message = refusal(target, ServerConfig(url, retries=1))
    assert "cannot be reached in 2 tries" in message
    assert "refused" in message
    assert "start the server" in message


def test_a_model_that_the_server_does_not_have_is_refused_before_any_request(
    target: Target,
) -> None:
    with serving(target, name="llama") as served:
        message = refusal(target, served.config(model="lama"))
        assert "llama" in message
        assert "--served-model-name" in message
        assert not served.requests


def test_a_server_of_shorter_texts_is_refused(target: Target) -> None:
    with serving(target, max_model_len=LENGTH - 1) as served:
        assert f"--max-model-len {LENGTH}" in refusal(target, served.config())
        assert not served.requests


def test_a_server_that_lies_about_its_model_is_found_out(target: Target) -> None:
    other_weights = tiny_target(vocab=300, seed=7)
    with serving(other_weights) as served:
        message = refusal(target, served.config())
        assert "is not target" in message
        assert "same weights" in message
    for tokenizes in (True, False):
        with serving(tiny_target(vocab=64), tokenizes=tokenizes) as served:
            served.complete = lambda body: {  # type: ignore[method-assign]
                "choices": [{"text": ""}],
                "usage": {"prompt_tokens": 3},
            }
            message = refusal(target, served.config())
            assert "tokenizer" in message
            assert "is not target" in message


def test_a_key_is_sent_and_stands_in_no_message(
    target: Target, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(target, key="secret") as served:
        assert "OPENAI_API_KEY" in refusal(target, served.config())
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        message = refusal(target, served.config())
        assert "401" in message
        assert "wrong" not in message
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert written(target, served.config()) == expected
        assert "secret" not in repr(ServedEngine(target, served.config()).__dict__)
        monkeypatch.setenv("OPENAI_API_KEY", "two words")
        assert "OPENAI_API_KEY holds" in refusal(target, served.config())


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"<html>not here</html>", "no JSON"),
        ({"choices": []}, "without a text"),
        ({"choices": [{"text": 3}]}, "no Completion"),
        ({"choices": [{"text": "a", "token_ids": [9999]}]}, "token 9999"),
        (
            {"choices": [{"text": "a", "token_ids": [5], "finish_reason": "length"}]},
            "--max-model-len",
        ),
        (
            {"choices": [{"text": "a", "token_ids": [5]}], "usage": {"prompt_tokens": 999}},
            "999 tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_is_none_is_refused(target: Target, answer: Any, named: str) -> None:
    with serving(target) as served:
        engine = ServedEngine(target, served.config(concurrency=1))
        engine.check(LENGTH)
        served.faults.append(said(answer))
        with pytest.raises(FalconLabError, match=named):
            list(continue_texts(target, PROMPTS, LENGTH, engine=engine))


def test_a_refusal_shows_what_the_server_says(target: Target) -> None:
    with serving(target) as served:
        engine = ServedEngine(target, served.config(concurrency=1))
        engine.check(LENGTH)
        served.faults.append(lambda handler: handler.refuse(418, "I am a teapot"))
        with pytest.raises(FalconLabError, match=r"answers 418 \(I am a teapot\)"):
            list(continue_texts(target, PROMPTS, LENGTH, engine=engine))
