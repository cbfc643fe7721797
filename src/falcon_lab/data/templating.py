"""Chats as text, by a chat template, with the spans that an assistant wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from falcon_lab.data.corpora import Document

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
class Rendered:
    """A chat as text.

    Attributes:
        text: what the template made of it.
        learnt: ``(start, end)`` characters of what the assistant wrote, in order.
    """

    text: str
    learnt: list[tuple[int, int]]


def load_template(name: str | None) -> str | None:
    """A chat template by name: ``plain``, a file with Jinja, or None for the tokenizer's own.

    Raises:
        FalconLabError: no such file.
    """
    if name is None or name == "plain":
        return None if name is None else PLAIN
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FalconLabError(f"data.chat_template: cannot read {name!r} ({error})") from None


def render(document: Document, tokenizer: Any, template: str | None = None) -> Rendered:
    """A chat through ``template``, or the tokenizer's own.

    Raises:
        FalconLabError: there is no template, it refuses the chat, or it does not show where the
            assistant's words begin and end.
    """
    chosen = template or getattr(tokenizer, "chat_template", None)
    if not chosen:
        raise FalconLabError(
            f"sample {document.id} ({document.source}) is a chat, and the tokenizer has no chat "
            "template; set data.chat_template=plain, or to a file with a template"
        )
    chat = _Chat(document, tokenizer, chosen)
    if isinstance(chosen, str) and _TAG.search(chosen):
        return chat.by_marks()
    return chat.by_prefixes()


def _with_marks(template: str) -> str:
    """The template with characters of private use where a generated span begins and ends.

    Inside a block of its own each, so that blanks are trimmed around it as they are around the tag.
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
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )
        except Exception as error:  # whatever a template raises
            raise self._fault(f"the chat template refuses it ({error})") from error

    def by_marks(self) -> Rendered:
        """The template itself says what is generated (``{% generation %}``)."""
        whole = self.text(self.messages)
        marked = _Chat(self.document, self.tokenizer, _with_marks(self.template))
        parts = _EITHER_MARK.split(marked.text(self.messages))
        if "".join(parts) != whole or len(parts) % 2 == 0:
            raise self._fault("the chat template does not mark whole answers with {% generation %}")
        ends = list(accumulate(map(len, parts)))
        return Rendered(whole, list(zip(ends[0:-1:2], ends[1::2], strict=True)))

    def by_prefixes(self) -> Rendered:
        """Each answer stands between the prompt for it and the chat that ends with it."""
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
                "when the chat goes on; mark the answers in it with {% generation %}"
            )
        if whole.startswith(through):
            return len(prompt), len(through)
        return len(prompt), self._end(whole, len(prompt), through, number)

    def _end(self, whole: str, start: int, through: str, number: int) -> int:
        """The end of an answer that looks different while it is the last (thinking models)."""
        said = str(self.messages[number]["content"]).strip()
        closing = through[through.rfind(said) + len(said) :] if said else ""
        if said and whole.startswith(said + closing, start):
            return start + len(said + closing)
        raise self._fault(
            f"the chat template renders message {number + 1} otherwise when the chat goes on; "
            "mark the answers in it with {% generation %}"
        )

    def _fault(self, what: str) -> FalconLabError:
        return FalconLabError(f"sample {self.document.id} ({self.document.source}): {what}")
