"""An OpenAI-compatible server on this machine: a tiny target behind as much as is asked of one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from falcon_lab.config.schema import ServerConfig
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling

Fault = Callable[["Handler"], None]
"""Answers a request in place of the server."""

WAIT = 30.0
"""Seconds after which a test has gone wrong."""


@dataclass
class Served:
    """What a server has and is, and what it was asked.

    Attributes:
        target: that writes.
        name: under which it is served.
        max_model_len: that is said; None says none.
        takes_ids, gives_ids, tokenizes: what it can do beyond OpenAI's interface.
        key: that it asks for.
        faults: what the next completions get in place of an answer, in turn.
        requests: bodies of the completions that were asked for, faults counted.
        keys: headers that came with them.
        most: requests that were open at the same time.
        gate: completions wait for it.
        opened: is released by each that waits.
    """

    target: Target
    name: str = "tiny"
    max_model_len: int | None = None
    takes_ids: bool = True
    gives_ids: bool = True
    tokenizes: bool = True
    key: str | None = None
    faults: list[Fault] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    counting: threading.Lock = field(default_factory=threading.Lock)
    open: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def config(self, **options: Any) -> ServerConfig:
        return ServerConfig(**{"url": self.url, "retries": 2, "timeout": WAIT, **options})

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer, prompt = self.target.tokenizer, body["prompt"]
        if isinstance(prompt, str):
            prompt = tokenizer(prompt, add_special_tokens=True)["input_ids"]
        stop = StopCondition(self.target.eos_ids)
        with self.lock:  # a tiny target has one cache at a time
            written = PlainEngine(self.target).generate(
                torch.tensor(prompt),
                max_new_tokens=body["max_tokens"],
                sampling=Sampling(body["temperature"]),
                generator=torch.Generator().manual_seed(body.get("seed", 0)),
                stop=stop,
            )
        ended = written.finish == "eos"
        choice: dict[str, Any] = {
            "index": 0,
            "text": tokenizer.decode(written.tokens[:-1] if ended else written.tokens),
            "finish_reason": "stop" if ended else "length",
        }
        if self.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = written.tokens
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code: int, message: str) -> None:
        self.answer({"error": {"message": message, "code": code}}, code)

    def do_GET(self) -> None:
        served = self.server.served
        served.paths.append(self.path)
        if served.key is not None and self.headers["Authorization"] != f"Bearer {served.key}":
            self.refuse(401, "Unauthorized")
            return
        model: dict[str, Any] = {"id": served.name, "object": "model"}
        if served.max_model_len is not None:
            model["max_model_len"] = served.max_model_len
        self.answer({"object": "list", "data": [model]})

    def do_POST(self) -> None:
        served = self.server.served
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._tokenize(served, body)
        elif body["model"] != served.name:
            self.refuse(404, f"The model {body['model']} does not exist.")
        else:
            self._complete(served, body)

    def _tokenize(self, served: Served, body: dict[str, Any]) -> None:
        if not served.tokenizes:
            self.refuse(404, "Not Found")
            return
        special = body["add_special_tokens"]
        tokens = served.target.tokenizer(body["prompt"], add_special_tokens=special)["input_ids"]
        self.answer({"tokens": tokens, "count": len(tokens)})

    def _complete(self, served: Served, body: dict[str, Any]) -> None:
        served.requests.append(body)
        if served.faults:
            served.faults.pop(0)(self)
            return
        if not served.takes_ids and not isinstance(body["prompt"], str):
            self.refuse(422, "prompt must be a string")
            return
        with served.counting:
            served.open += 1
            served.most = max(served.most, served.open)
        served.opened.release()
        assert served.gate.wait(WAIT)
        answer = served.complete(body)
        with served.counting:
            served.open -= 1  # before whoever waits can send another one
        self.answer(answer)

    def log_message(self, *arguments: Any) -> None:
        """Be silent."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, served: Served) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served = served
        served.port = self.server_port

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent: a client that does not wait for its answer is a part of the tests."""


@contextmanager
def serving(target: Target, **options: Any) -> Iterator[Served]:
    """Serve a target in threads of this process."""
    served = Served(target, **options)
    with Server(served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            served.gate.set()
            server.shutdown()
            thread.join()


# --- faults ---------------------------------------------------------------------------------------


def cut(handler: Handler) -> None:
    """Promise more than is sent."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    """Close the connection without a word."""
    handler.close_connection = True
    handler.connection.close()


def refused(code: int, **headers: str) -> Fault:
    """Answer with a status."""
    return lambda handler: handler.answer({"error": {"message": "busy"}}, code, **headers)


def said(content: Any) -> Fault:
    """Answer with something else."""
    return lambda handler: handler.answer(content)


def until(event: threading.Event) -> Fault:
    """Answer nothing before an event, and nothing then."""

    def wait(handler: Handler) -> None:
        event.wait(WAIT)
        hang_up(handler)

    return wait
