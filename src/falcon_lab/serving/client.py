"""An OpenAI-compatible server: requests that are tried again, and answers that are checked.

vLLM, SGLang and others serve a model behind the same few addresses. ``/v1/completions`` takes token
ids as a prompt, so that no chat template is applied a second time, and with ``return_token_ids`` it
gives those of the answer (vLLM since 0.10.2, SGLang since July 2026).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    MaxRetryError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)
from urllib3.util import Retry, Timeout

from falcon_lab.config.schema import ServerConfig
from falcon_lab.environment import KEY_VARIABLE
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.stored import fitting, parse_json

T = TypeVar("T")
Asked = TypeVar("Asked")
Answered = TypeVar("Answered")

CONNECT = 10.0
"""Seconds that opening a connection may take."""
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a request is sent again."""
BACKOFF, LONGEST_BACKOFF = 0.5, 60
"""Seconds that the waits between tries grow from, twofold each, and that none exceeds."""
QUOTED = 200
"""Characters of a server's own message that are shown."""


@dataclass(frozen=True)
class Model:
    """A model that a server has.

    Attributes:
        id: its name there.
        max_model_len: tokens that it reads; None where the server does not say.
        root: folder or hub id that it was loaded from, where the server says.
    """

    id: str
    max_model_len: int | None = None
    root: str | None = None


@dataclass(frozen=True)
class Models:
    """The answer of ``/v1/models``."""

    data: list[Model]


@dataclass(frozen=True)
class Tokens:
    """The answer of ``/tokenize``."""

    tokens: list[int]


@dataclass(frozen=True)
class Choice:
    """A text of a completion.

    Attributes:
        text: without the token that ended it.
        finish_reason: ``stop`` or ``length``.
        token_ids: of the text, with the one that ended it; None where the server gives none.
        stop_reason: of vLLM, what ended it: a token, a text, or None for its own end token.
        matched_stop: the same of SGLang.
    """

    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None


@dataclass(frozen=True)
class Usage:
    """How much a request took."""

    prompt_tokens: int
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """The answer of ``/v1/completions``."""

    choices: list[Choice]
    usage: Usage | None = None


class RefusedError(FalconLabError):
    """A server has answered that it will not do what it was asked.

    Attributes:
        status: of its answer.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(FalconLabError):
    """No server answers, or none to the end."""


@dataclass
class Server:
    """A server by its address.

    A request that finds no server, is cut off, waits for too long or is put off (429, 5xx) is sent
    again after a wait that doubles each time, or is what the server asks for by ``Retry-After``.
    It may be asked by many threads.

    Attributes:
        config: where it is and how it is asked.
        key: sent as a bearer token; None sends none.
    """

    config: ServerConfig
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        # It has a line for every try, and what is left of them in the end is in our error.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self.root = config.url.rstrip("/").removesuffix("/v1").rstrip("/")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        self._pool = urllib3.PoolManager(
            maxsize=config.concurrency,
            headers=headers,
            timeout=Timeout(connect=min(CONNECT, config.timeout), read=config.timeout),
            retries=Retry(
                total=config.retries,
                allowed_methods=None,
                status_forcelist=AGAIN,
                backoff_factor=BACKOFF,
                backoff_max=LONGEST_BACKOFF,
                backoff_jitter=BACKOFF,
                raise_on_status=False,
            ),
        )

    def models(self) -> list[Model]:
        """Return what the server has.

        Raises:
            FalconLabError: it does not answer, or not as such a server does.
        """
        return self._ask("GET", "/v1/models", None, Models).data

    def tokenize(self, model: str, text: str) -> list[int] | None:
        """Return a text's tokens without special ones; None where there is no ``/tokenize``.

        Raises:
            FalconLabError: the server does not answer.
        """
        request = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return self._ask("POST", "/tokenize", request, Tokens).tokens
        except RefusedError:
            return None

    def complete(self, request: Mapping[str, Any]) -> Completion:
        """Return what a model writes.

        Args:
            request: the body of ``/v1/completions``.

        Raises:
            RefusedError: the server will not.
            FalconLabError: it does not answer, or answers without a text.
        """
        found = self._ask("POST", "/v1/completions", request, Completion)
        if not found.choices:
            raise FalconLabError(f"{self._at('/v1/completions')} answers without a text")
        return found

    def _at(self, path: str) -> str:
        return f"data.server {self.root}{path}"

    def _ask(self, method: str, path: str, request: Mapping[str, Any] | None, shape: type[T]) -> T:
        where = self._at(path)
        body = None if request is None else json.dumps(request).encode()
        try:
            answer = self._pool.request(method, f"{self.root}{path}", body=body, redirect=False)
        except HTTPError as error:
            raise UnreachableError(f"{where} {self._unreached(error)}") from error
        if answer.status != HTTPStatus.OK:
            raise RefusedError(f"{where} {_refusal(answer.status, answer.data)}", answer.status)
        content = parse_json(answer.data, f"{where} answers no JSON", WRONG_SERVER, finite=False)
        found = fitting(content, shape)
        if found is None:
            raise FalconLabError(
                f"{where} answers what is no {shape.__name__} of an OpenAI-compatible server "
                f"({answer.data[:QUOTED]!r}); {WRONG_SERVER}"
            )
        return found

    def _unreached(self, error: HTTPError) -> str:
        """Return why a request came to nothing, and what to do."""
        config = self.config
        reason: BaseException = error
        if isinstance(error, MaxRetryError) and error.reason is not None:
            reason = error.reason
        tries = f"in {config.retries + 1} tries"
        if isinstance(reason, NewConnectionError | ConnectTimeoutError):
            said = one_line(reason).rpartition(": ")[2]
            return f"cannot be reached {tries} ({said}); start the server, or correct the address"
        if isinstance(reason, ReadTimeoutError):
            return (
                f"has not answered within {config.timeout:g} s {tries}; raise data.server.timeout, "
                "or lower data.server.concurrency"
            )
        if isinstance(reason, ProtocolError):
            return (
                f"has cut off its answer {tries} ({one_line(reason):.{QUOTED}}); look at the "
                "server's log, and run the same command again"
            )
        return f"cannot be asked ({one_line(reason):.{QUOTED}}); correct data.server.url"


WRONG_SERVER = "name one that is, such as vLLM's or SGLang's, by data.server.url"
"""What to do where something else answers."""


def _refusal(status: int, body: bytes) -> str:
    """Return what a server has answered in place of what it was asked for, and what to do."""
    said = f"answers {status} ({_message(body)})"
    if status in (401, 403):
        return f"{said}; set {KEY_VARIABLE} to a key that it takes"
    if status in AGAIN:
        return f"{said} again and again; wait, or lower data.server.concurrency"
    return f"{said}; look at the server's log"


def _message(body: bytes) -> str:
    """Return the message inside the JSON of an error, or the beginning of what there is."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:QUOTED] or "nothing more"


class InFlight(Generic[Asked, Answered]):
    """Calls that wait for their answers in threads of their own, which end with the process.

    Args:
        call: is called in a thread.
    """

    def __init__(self, call: Callable[[Asked], Answered]) -> None:
        self.count = 0
        self._call = call
        self._threads = 0
        self._asked: queue.SimpleQueue[tuple[Asked] | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[tuple[Asked, Answered | BaseException]] = (
            queue.SimpleQueue()
        )

    def __enter__(self) -> InFlight[Asked, Answered]:
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let every thread end after the call that it is in."""
        for _ in range(self._threads):
            self._asked.put(None)

    def send(self, asked: Asked) -> None:
        """Begin a call."""
        if self.count == self._threads:
            # An executor's threads would hold up the end of the process until they are answered.
            threading.Thread(target=self._work, daemon=True).start()
            self._threads += 1
        self.count += 1
        self._asked.put((asked,))

    def receive(self) -> tuple[Asked, Answered]:
        """Wait for the next answer, whichever comes first.

        Raises:
            BaseException: what the call has raised.
        """
        asked, found = self._answered.get()
        self.count -= 1
        if isinstance(found, BaseException):
            raise found
        return asked, found

    def _work(self) -> None:
        while (item := self._asked.get()) is not None:
            try:
                found: Answered | BaseException = self._call(item[0])
            except BaseException as error:  # raised again by ``receive``
                found = error
            self._answered.put((item[0], found))


def chosen(models: Sequence[Model], config: ServerConfig) -> Model:
    """Return the model that a configuration names, or the only one that a server has.

    Raises:
        FalconLabError: it has none, not the one that is named, or several and none is named.
    """
    ids = [model.id for model in models]
    listed = ", ".join(ids[:10]) or "no model"
    if config.model is None and len(models) == 1:
        return models[0]
    if config.model is None:
        raise FalconLabError(
            f"data.server {config.url} serves {listed}; name one of them by data.server.model"
        )
    if config.model not in ids:
        raise FalconLabError(
            f"data.server.model is {config.model!r}, and {config.url} serves {listed}; name what "
            "it serves, or start it with --served-model-name"
        )
    return models[ids.index(config.model)]
