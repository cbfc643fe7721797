"""Documents: plain texts and chats, read from JSONL files, and chats rendered as text."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, check_text
from falcon_lab.stored import LARGEST, parse_json, read_bounded

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Speakers of either layout, and the role that a chat template knows."""
PLAIN = (
    "{% for message in messages %}"
    "### {{ message['role'] | capitalize }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant\n{% endif %}"
)
"""For tokenizers that bring no template of their own."""

_TAG = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
_START, _END = "\uf8f0", "\uf8f1"
_EITHER_MARK = re.compile(f"[{_START}{_END}]")


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a chat.

    Attributes:
        id: unique in its corpus.
        text: the text, or None for a chat.
        messages: ``{"role": …, "content": …}`` turn by turn, or None for a text.
        source: where it comes from, ``file:line`` or a file, for error messages.
        tools: that a chat's assistant may call, as JSON schemas.
    """

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    source: str = ""
    tools: list[dict[str, Any]] | None = None


# --- files of chats or texts ----------------------------------------------------------------------


def read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)`` of every line that is not blank.

    A file whose name ends in ``.gz`` is read compressed.

    Raises:
        FalconLabError: a line is no JSON object, or the file is cut off or too large; names file,
            line and fault.
    """
    compressed = file.suffix == ".gz"
    with (
        about(file, "read", also=(EOFError, zlib.error)),
        gzip.open(file) if compressed else file.open("rb") as lines,
    ):
        number = unpacked = 0
        while raw := lines.readline(LARGEST + 1):
            number += 1
            unpacked += len(raw)
            # A small file may unpack to more than there is memory.
            if len(raw) > LARGEST or (compressed and unpacked > LARGEST):
                raise FalconLabError(
                    f"{file}:{number}: more than {LARGEST // 2**20} MiB up to here; split the file"
                )
            if raw.strip():
                yield number, _object(raw, f"{file}:{number}")


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        # A byte-order mark may stand before the first line.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FalconLabError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start + 1}); save the file as UTF-8"
        ) from None
    value = parse_json(text.strip(), f"{where}: no JSON object", MEND, finite=False)
    if not isinstance(value, dict):
        raise FalconLabError(f"{where}: a JSON object is needed, found {kind(value)}; {MEND}")
    return value


MEND = "mend the line or take it out"
"""What to do about a line that cannot be used."""


def read_documents(file: Path, name: str) -> Iterator[Document]:
    """Yield the documents of a JSONL file of chats or texts, whose ids begin with ``name``.

    ``{"messages": [{"role", "content"}]}`` (OpenAI), ``{"conversations": [{"role", "content"}]}``,
    ``{"conversations": [{"from", "value"}]}`` (ShareGPT) and ``{"text": …}`` are read; beside
    messages, ``{"tools": […]}`` are what the assistant may call.

    Raises:
        FalconLabError: a line is none of these; names file, line and fault.
    """
    seen: set[str] = set()
    for number, value in read_jsonl(file):
        given = value.get("id")
        key = str(given if isinstance(given, str | int) else number)[:LONGEST_ID]
        if key in seen:  # collections put together from parts repeat their ids
            key = f"{key}@{number}"
        seen.add(key)
        try:
            text, messages = _sample(value)
            tools = None if messages is None else tools_of(value.get("tools"))
        except ValueError as error:
            raise FalconLabError(f"{file}:{number}: {error}; {MEND}") from None
        yield Document(f"{name}:{key}", text, messages, f"{file}:{number}", tools)


LONGEST_ID = 200
"""Characters of a sample's id that are kept."""


def _sample(value: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]] | None]:
    """Return the text of a sample and None, or None and its messages."""
    if isinstance(text := value.get("text"), str):
        return text, None
    turns = value.get("messages", value.get("conversations"))
    if turns is None:
        keys = ", ".join(value) or "none"
        raise ValueError(f"no messages, conversations or text among its keys ({keys:.80})")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"a list of messages is needed, found {kind(turns)}")
    return None, messages_of(turns)


class UnknownRoleError(ValueError):
    """A message is by nobody who is known."""


class NotTextError(ValueError):
    """A message is not text, or has parts that are not."""


def messages_of(turns: list[Any]) -> list[dict[str, Any]]:
    """Return messages of either layout as chat templates know them.

    Raises:
        ValueError: one is none, with its number.
    """
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a sample, which may be the text of a JSON list.

    Raises:
        ValueError: they are no list of objects.
    """
    tools = _parsed(value)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"a list of tools is needed, found {kind(tools)}")
    return tools


def _calls(calls: Any) -> Any:
    """Return calls of tools with arguments that are objects, as chat templates want them."""
    if not isinstance(calls, list):
        return calls
    return [_call(call) for call in calls]


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": _parsed(function["arguments"])}}


def _parsed(value: Any) -> Any:
    """Return what the text of a JSON list or object holds; all else as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _message(turn: Any, number: int) -> dict[str, Any]:
    """Return a turn of either layout as ``role`` and ``content``, and what else it has."""
    if not isinstance(turn, dict):
        raise ValueError(f"message {number} is {kind(turn)}, not an object")
    speaker, content = ("from", "value") if "from" in turn else ("role", "content")
    for key in (speaker, content):
        if key not in turn:
            raise ValueError(f"message {number} has no {key!r}")
    role = ROLES.get(turn[speaker]) if isinstance(turn[speaker], str) else None
    if role is None:
        known = ", ".join(sorted(ROLES))
        raise UnknownRoleError(f"message {number} is by {turn[speaker]!r:.80}; known are {known}")
    own = ("from", "value", "role", "content")
    # Tables have every column in every row, and templates ask whether there is one.
    rest = {k: v for k, v in turn.items() if k not in own and v is not None}
    if "tool_calls" in rest:
        rest["tool_calls"] = _calls(rest["tool_calls"])
    return {"role": role, "content": _content(turn[content], number), **rest}


def _content(content: Any, number: int) -> str:
    """Return the text of a message, which may be a list of text parts."""
    if content is None:  # a call of a tool has no text
        return ""
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "".join(parts)
        raise NotTextError(f"message {number} has parts that are not text")
    if not isinstance(content, str):
        raise NotTextError(f"the content of message {number} is {kind(content)}, not a text")
    return content


def kind(value: Any) -> str:
    """Return a JSON value's kind in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return "null" if value is None else names.get(type(value), "a number")


# --- chat templates -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text.

    Attributes:
        text: what the template made of it.
        answers: ``(start, end)`` characters of what the assistant wrote, in order.
    """

    text: str
    answers: list[tuple[int, int]]


def load_template(name: str | None) -> str | None:
    """Return a chat template: ``plain``, a Jinja file's, or None for the tokenizer's own.

    Raises:
        FalconLabError: no such file.
    """
    if name is None or name == "plain":
        return None if name is None else PLAIN
    try:
        return read_bounded(Path(name), LARGEST_TEMPLATE).decode()
    except (FalconLabError, UnicodeDecodeError) as error:
        raise FalconLabError(
            f"data.chat_template: cannot read {name!r} ({error}); say plain, or name a file with a "
            "template in UTF-8"
        ) from error


LARGEST_TEMPLATE = 2**20
"""Bytes of a chat template."""


def render(document: Document, tokenizer: Any, template: str | None = None) -> Rendered:
    """Render a chat by ``template``, or by the tokenizer's own.

    Raises:
        FalconLabError: there is no template, it refuses the chat, or it does not show where the
            assistant's answers begin and end.
    """
    chat = _chat(document, tokenizer, template)
    if isinstance(chat.template, str) and _TAG.search(chat.template):
        return chat.by_marks()
    return chat.by_prefixes()


def chat_text(document: Document, tokenizer: Any, template: str | None = None) -> str:
    """Return a chat as text, to where the assistant's answer begins.

    Raises:
        FalconLabError: there is no template, or it refuses the chat.
    """
    chat = _chat(document, tokenizer, template)
    return chat.text(chat.messages, prompt=True)


def _chat(document: Document, tokenizer: Any, template: str | None) -> _Chat:
    chosen = template or getattr(tokenizer, "chat_template", None)
    if not chosen:
        raise FalconLabError(
            f"sample {document.id} ({document.source}) is a chat, and the tokenizer has no chat "
            "template; set data.chat_template=plain, or to a file with a template"
        )
    return _Chat(document, tokenizer, chosen)


def _with_marks(template: str) -> str:
    """Return the template with private-use characters around what ``generation`` tags enclose.

    Each stands in a block of its own, so that blanks are trimmed around it as around the tag.
    """

    def mark(tag: re.Match[str]) -> str:
        sign = _END if tag["end"] else _START
        return f"{{%{tag['left']} if true %}}{{{{ '{sign}' }}}}{{% endif {tag['right']}%}}"

    return _TAG.sub(mark, template)


class _Chat:
    """One chat and its template."""

    def __init__(self, document: Document, tokenizer: Any, template: Any) -> None:
        self.document, self.tokenizer, self.template = document, tokenizer, template
        self.messages = document.messages or []

    def text(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=self.document.tools,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )
            return check_text(text, "what it writes")
        except Exception as error:  # whatever a template raises
            raise self._fault(
                f"the chat template refuses it ({error}); leave the sample out, or name another "
                "template with data.chat_template"
            ) from error

    def by_marks(self) -> Rendered:
        """Find the answers by the template's own ``{% generation %}`` tags."""
        whole = self.text(self.messages)
        marked = _Chat(self.document, self.tokenizer, _with_marks(self.template))
        parts = _EITHER_MARK.split(marked.text(self.messages))
        if "".join(parts) != whole or len(parts) % 2 == 0:
            raise self._fault("the chat template does not mark whole answers with {% generation %}")
        ends = list(accumulate(map(len, parts)))
        return Rendered(whole, list(zip(ends[0:-1:2], ends[1::2], strict=True)))

    def by_prefixes(self) -> Rendered:
        """Find each answer between the prompt for it and the chat that ends with it."""
        whole = self.text(self.messages)
        spans = [
            self._answer(whole, number)
            for number, message in enumerate(self.messages)
            if message["role"] == "assistant" and number
        ]
        return Rendered(whole, spans)

    def _answer(self, whole: str, number: int) -> tuple[int, int]:
        prompt = self.text(self.messages[:number], prompt=True)
        through = self.text(self.messages[: number + 1])
        if not whole.startswith(prompt):
            raise self._fault(
                f"the chat template renders what stands before message {number + 1} otherwise "
                "when the chat continues; mark the answers in it with {% generation %}"
            )
        if whole.startswith(through):
            return len(prompt), len(through)
        return len(prompt), self._end(whole, len(prompt), through, number)

    def _end(self, whole: str, start: int, through: str, number: int) -> int:
        """Find the end of an answer that renders otherwise where it is last (thinking models)."""
        answer = str(self.messages[number]["content"]).strip()
        closing = through[through.rfind(answer) + len(answer) :] if answer else ""
        if answer and whole.startswith(answer + closing, start):
            return start + len(answer + closing)
        raise self._fault(
            f"the chat template renders message {number + 1} otherwise when the chat continues; "
            "mark the answers in it with {% generation %}"
        )

    def _fault(self, what: str) -> FalconLabError:
        return FalconLabError(f"sample {self.document.id} ({self.document.source}): {what}")
