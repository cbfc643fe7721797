"""Dialogues that an instruct target writes itself: what a drafter should be trained on.

Behind the header of a user's turn the target writes the question (as in Magpie, arXiv 2406.08464),
and then the answer to it, in the place of the question. Dialogues are numbered, everything random
about one is seeded by (seed, number), and they are written in parts, each of which begins with
empty caches and is appended to the file whole. So the file depends neither on when it was
interrupted nor, but for rounding, on how many texts are written side by side.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.schema import dtype_name
from falcon_lab.data.corpora import digest
from falcon_lab.data.dialogue_card import SHOWN, Card, Line, Statistics, Writer, card_path
from falcon_lab.data.dialogue_rules import UNREADABLE, EndOrLoop, KeptOut, fault_of, words
from falcon_lab.data.documents import Document, chat_text, read_documents, read_jsonl
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.round import DecodedSequence
from falcon_lab.decoding.stopping import begin
from falcon_lab.errors import FalconLabError
from falcon_lab.files import write_behind
from falcon_lab.interfaces.vocabulary import special_tokens
from falcon_lab.sampling import Sampling
from falcon_lab.stored import fitting
from falcon_lab.timing import Stopwatch

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import Decodes
    from falcon_lab.decoding.generation import Generation
    from falcon_lab.decoding.served import ServedEngine
    from falcon_lab.model.target import Target

OnText = Callable[[int], None]
"""Called with the number of tokens of every answer that was written."""

OnPart = Callable[[Card], None]
"""Called with the card of a file that has grown."""

REREAD = 16
"""Tokens that a question may have more when it is read in its prompt; with more it is too long."""

_MARK = "\uf8f2"
"""Stands for the content of a message; of private use, so that no template writes it."""


@dataclass(frozen=True)
class DialogueSettings:
    """What decides the dialogues, beside target and template.

    Attributes:
        seed: of all that is drawn.
        temperature: of what is sampled: the questions, and some answers.
        sampled: share of the answers that are sampled; the others are greedy.
        given: share of the questions that are taken from those given, as long as there are any.
        question_tokens: of a question at the most; a longer one is dropped.
        answer_tokens: of an answer at the most; a longer one is cut.
        batch_size: texts side by side.
        part: dialogues that are begun together, and of which an interruption costs one lot.
    """

    seed: int = 0
    temperature: float = 1.0
    sampled: float = 0.0
    given: float = 0.5
    question_tokens: int = 128
    answer_tokens: int = 512
    batch_size: int = 64
    part: int = 256


# --- questions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatForm:
    """A chat template, as far as a target must know it to write both sides.

    Attributes:
        tokenizer: the target's.
        template: in place of its own; None: its own.
        header: tokens before a user's first words.
        closing: what ends them where no end token does, or empty.
    """

    tokenizer: Any
    template: str | None
    header: list[int]
    closing: str

    @classmethod
    def of(cls, target: Target, template: str | None = None) -> ChatForm:
        """Find out how a target's chats begin.

        Raises:
            FalconLabError: there is no chat template, or it hides what a user says.
        """
        tokenizer = target.tokenizer
        if not (template or getattr(tokenizer, "chat_template", None)):
            raise FalconLabError(
                f"target {target.name} has no chat template, so that it cannot write dialogues; "
                "choose an instruct model, or set data.chat_template to a file with a template"
            )
        text = chat_text(_asked(_MARK), tokenizer, template)
        before, mark, after = text.partition(_MARK)
        if not mark or _MARK in after:
            raise FalconLabError(
                f"target {target.name}: its chat template does not show once what a user says; set "
                "data.chat_template to a file with another one"
            )
        ids = _encoded(after, tokenizer)
        ends = bool(ids) and ids[0] in target.eos_ids
        header = _encoded(before.rstrip(" "), tokenizer)
        if not header:
            raise FalconLabError(
                f"target {target.name}: its chat template writes nothing before what a user says, "
                "so that a target cannot tell where to begin; set data.chat_template to a file "
                "with another one"
            )
        return cls(tokenizer, template, header, "" if ends else after.strip())

    def prompt(self, question: str) -> list[int]:
        """Return all that the target reads before it answers."""
        return _encoded(chat_text(_asked(question), self.tokenizer, self.template), self.tokenizer)


def _asked(question: str) -> Document:
    return Document("of a user", messages=[{"role": "user", "content": question}])


def _encoded(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def read_questions(path: Path) -> list[str]:
    """Return the questions of a JSONL: texts, or what the user says first in chats.

    Raises:
        FalconLabError: a line is neither, or there is no question.
    """
    found = []
    for document in read_documents(path, path.name):
        turns = document.messages or [{"role": "user", "content": document.text or ""}]
        found += [turn["content"] for turn in turns if turn["role"] == "user"][:1]
    if not any(map(words, found)):
        raise FalconLabError(f"{path}: there is no question in it")
    return found


# --- a part -------------------------------------------------------------------------------------


@dataclass
class Draft:
    """A dialogue that is being written.

    Attributes:
        number: among all that were begun.
        question: what is asked.
        prompt: all that the target reads before it answers.
        question_tokens: that were written, or read of a given question.
        given: whether the question was given.
    """

    number: int
    question: str
    prompt: list[int]
    question_tokens: int
    given: bool


@dataclass
class Texts:
    """What was written of a part.

    Attributes:
        asked: number -> the question, or why it is left out.
        answers: number -> the answer to it.
    """

    asked: dict[int, Draft | str] = field(default_factory=dict)
    answers: dict[int, Generation] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)

    def is_first(self, key: str, number: int) -> bool:
        """Return whether no question of a smaller number is known that is the same."""
        first = min(number, self._first.get(key, number))
        self._first[key] = first
        return first == number


@dataclass
class Part:
    """What came of the dialogues that were begun together."""

    lines: list[Line] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    overlaps: list[dict[str, Any]] = field(default_factory=list)
    _keys: set[str] = field(default_factory=set)

    def takes(self, key: str) -> bool:
        """Return whether a text has not been in this part, and remember it."""
        known = key in self._keys
        self._keys.add(key)
        return not known

    def drop(self, reason: str) -> None:
        """Count a dialogue that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


class Dialogist:
    """A target that writes dialogues.

    Args:
        target: the model.
        form: of its chats.
        settings: what decides them.
        questions: that are given.
        kept_out: prompts that none may hold; none is kept out where it is left out.
        engine: a server that writes in the target's place; None: the target itself.
    """

    def __init__(
        self,
        target: Target,
        form: ChatForm,
        settings: DialogueSettings,
        questions: Sequence[str] = (),
        kept_out: KeptOut | None = None,
        engine: ServedEngine | None = None,
    ) -> None:
        self.settings, self.target = settings, target
        self._server = engine
        self._engine: Decodes = engine or PlainEngine(target, shares_beginnings=True)
        self._form = form
        self.kept_out = kept_out or KeptOut()
        self._special = special_tokens(target)
        order = partial(_digest_of, settings.seed)
        self._given = [questions[i] for i in sorted(range(len(questions)), key=order)]
        tokenizer = target.tokenizer
        self._ends_question = EndOrLoop(
            target.eos_ids, [form.closing] if form.closing else [], tokenizer
        )
        self._ends_answer = EndOrLoop(target.eos_ids, [], tokenizer)
        most = len(form.prompt(_MARK)) + settings.question_tokens + REREAD
        self._longest_prompt = min(most, target.max_positions - 1)
        longest = max(
            len(form.header) + settings.question_tokens,
            self._longest_prompt + settings.answer_tokens,
        )
        self._longest = min(longest, target.max_positions)

    def facts(self) -> dict[str, Any]:
        """Return all that decides the dialogues, as plain values."""
        others = [self._form.header, self._form.closing, self._form.template or ""]
        return {
            **asdict(self.settings),
            "dtype": dtype_name(self.target.dtype),
            "template": digest(json.dumps(others))[:12],
            "questions": digest(json.dumps(self._given))[:12] if self._given else None,
            "kept_out": digest(json.dumps(self.kept_out.facts))[:12],
            "server": None if self._server is None else self._server.config.model or "served",
        }

    def check(self) -> None:
        """See that a server that is to write runs the target.

        Raises:
            FalconLabError: it does not.
        """
        if self._server is not None:
            self._server.check(self._longest)

    def part(self, number: int, seen: Collection[str], on_text: OnText) -> Part:
        """Write the dialogues of a part.

        Args:
            number: of the part.
            seen: keys of all questions and answers that are in the file (``keys_of``).
            on_text: called as answers are written.
        """
        size = self.settings.part
        numbers = range(number * size, (number + 1) * size)
        texts, made = self._texts(numbers, seen, on_text), Part()
        drafts = [
            draft
            for n in numbers
            if (draft := self._taken(texts.asked[n], made)) is not None
            and self._is_new(draft.question, "question", made, seen)
        ]
        for draft in drafts:
            line = self._line(draft, texts.answers[draft.number], made, seen)
            if line is not None:
                made.lines.append(line)
        return made

    # --- what is written --------------------------------------------------------------------

    @torch.inference_mode()
    def _texts(self, numbers: Sequence[int], seen: Collection[str], on_text: OnText) -> Texts:
        """Write the texts of a part, side by side: an answer as soon as its question is there.

        It takes its question's place, of which it is a continuation. Which of two equal questions
        is the duplicate is known by their numbers alone, so that now and then one is answered that
        is dropped in the end.
        """
        texts, waiting = Texts(), deque[DecodedSequence]()
        for number in numbers:
            given = self._given_at(number)
            if given is None:
                waiting.append(self._sequence(number, "question", self._form.header))
            else:
                waiting.extend(self._asked(number, self._given_draft(number, given), texts, seen))
        batch_size = self.settings.batch_size
        for ended in self._engine.decode(waiting, batch_size, longest=self._longest):
            number, written = ended.number, ended.generation()
            if number in texts.asked:
                texts.answers[number] = written
                on_text(len(written.tokens))
            else:
                draft = self._written_draft(number, written)
                waiting.extendleft(self._asked(number, draft, texts, seen))
        return texts

    def _asked(
        self, number: int, draft: Draft | str, texts: Texts, seen: Collection[str]
    ) -> list[DecodedSequence]:
        """Note a question, or why it is none; return its answer, if it may have one."""
        texts.asked[number] = draft
        if isinstance(draft, str) or self.kept_out.hit(draft.question) is not None:
            return []
        key = _key("question", draft.question)
        if key in seen or not texts.is_first(key, number):
            return []
        return [self._sequence(number, "answer", draft.prompt)]

    def _sequence(self, number: int, what: str, prompt: list[int]) -> DecodedSequence:
        """Return a text that is to be written."""
        settings, device = self.settings, self.target.device
        answers = what == "answer"
        greedy = answers and not self._is_sampled(number)
        transcript = begin(
            prompt,
            settings.answer_tokens if answers else settings.question_tokens,
            self.target.max_positions,
            self._ends_answer if answers else self._ends_question,
        )
        return DecodedSequence(
            number,
            torch.tensor(prompt, device=device),
            transcript,
            Sampling(0.0 if greedy else settings.temperature),
            torch.Generator(device).manual_seed(_seed(settings.seed, number, what)),
        )

    # --- questions --------------------------------------------------------------------------

    def _given_at(self, number: int) -> str | None:
        """Return the given question of a number: they are spread evenly, each asked once."""
        share = self.settings.given
        place = int(number * share)
        if int((number + 1) * share) == place or place >= len(self._given):
            return None
        return self._given[place]

    def _given_draft(self, number: int, text: str) -> Draft | str:
        """Return a question that was given, or why it is left out."""
        text = text.strip()
        tokens = _encoded(text, self._form.tokenizer)
        if not words(text):
            return "empty"
        if len(tokens) > self.settings.question_tokens:
            return "long"
        if not self._special.isdisjoint(tokens):
            return "broken"
        return self._draft(number, text, len(tokens), given=True)

    def _written_draft(self, number: int, written: Generation) -> Draft | str:
        """Return a question that the target has written, or why it is left out."""
        tokens = _without_end(written.tokens, self._ends_question)
        text = self._ends_question.text(tokens).strip()
        if (reason := fault_of(text, tokens, self._special)) is not None:
            return reason
        if written.finish in ("length", "context"):
            return "long"
        return self._draft(number, text, len(written.tokens), given=False)

    def _draft(self, number: int, question: str, tokens: int, *, given: bool) -> Draft | str:
        prompt = self._form.prompt(question)
        if len(prompt) > self._longest_prompt:
            return "long"
        return Draft(number, question, prompt, tokens, given)

    @staticmethod
    def _taken(draft: Draft | str, made: Part) -> Draft | None:
        """Return a question; where there is none, count why."""
        if isinstance(draft, Draft):
            return draft
        made.drop(draft)
        return None

    def _is_new(self, text: str, what: str, made: Part, seen: Collection[str]) -> bool:
        """Return whether a text is neither a duplicate nor an evaluation's."""
        if (hit := self.kept_out.hit(text)) is not None:
            made.drop("overlap")
            made.overlaps.append({"in": what, "set": hit.source, "words": hit.words})
            return False
        key = _key(what, text)
        if not made.takes(key) or key in seen:
            made.drop("duplicate")
            return False
        return True

    # --- answers ----------------------------------------------------------------------------

    def _is_sampled(self, number: int) -> bool:
        return _seed(self.settings.seed, number, "sampled") / _SEEDS < self.settings.sampled

    def _line(
        self, draft: Draft, answer: Generation, made: Part, seen: Collection[str]
    ) -> Line | None:
        tokens = _without_end(answer.tokens, self._ends_answer)
        text = self._ends_answer.text(tokens)
        if answer.finish in ("length", "context"):  # may end within a character
            text = text.rstrip(UNREADABLE)
        text = text.strip()
        reason = fault_of(text, tokens, self._special)
        if reason is not None:
            made.drop(reason)
            return None
        if not self._is_new(text, "answer", made, seen):
            return None
        chat = [{"role": "user", "content": draft.question}, {"role": "assistant", "content": text}]
        return Line(
            draft.number,
            chat,
            [draft.question_tokens, len(answer.tokens)],
            draft.given,
            self._is_sampled(draft.number),
            answer.finish,
        )


def keys_of(line: Line) -> set[str]:
    """Return by what question and answer are known again."""
    return {_key("question", line.question), _key("answer", line.answer)}


def _key(what: str, text: str) -> str:
    return digest(f"{what}:{' '.join(words(text))}")[:24]


_SEEDS = 2**60


def _seed(*parts: object) -> int:
    """Return a seed of its own for everything that is drawn."""
    return int(digest(":".join(map(str, parts)))[:15], 16)


def _digest_of(seed: int, number: int) -> str:
    return digest(f"{seed}:{number}")


def _without_end(tokens: list[int], stop: EndOrLoop) -> list[int]:
    return tokens[:-1] if tokens[-1:] and tokens[-1] in stop.eos_ids else tokens


# --- the file -----------------------------------------------------------------------------------


def open_card(path: Path, dialogist: Dialogist) -> Card:
    """Return the card of a file that is to be begun or continued.

    Raises:
        FalconLabError: the file is a stranger's, was written otherwise, or has lost its end.
    """
    facts, target = json.loads(json.dumps(dialogist.facts())), dialogist.target
    if not card_path(path).exists():
        if path.exists():
            raise FalconLabError(
                f"{path}: is there already without {card_path(path).name}, so it is no unfinished "
                "file of dialogues; move it or give another --out"
            )
        return Card(Writer(target.name, target.fingerprint), facts, dict(dialogist.kept_out.sets))
    card = Card.read(path)
    if card.target.fingerprint != target.fingerprint:
        raise FalconLabError(
            f"{path}: was written by {card.target.name} (fingerprint {card.target.fingerprint}), "
            f"and the target is {target.name} ({target.fingerprint}); give another --out"
        )
    if differing := sorted(
        k for k in {*facts, *card.settings} if facts.get(k) != card.settings.get(k)
    ):
        told = ", ".join(f"{k}={card.settings.get(k)}" for k in differing)
        raise FalconLabError(
            f"{path}: was begun with {told}; continue it with the same, or give another --out"
        )
    size = path.stat().st_size if path.exists() else 0
    if size < card.bytes:
        raise FalconLabError(
            f"{path}: has {size} bytes, and its card counts {card.bytes}; its end is lost: copy it "
            "again, or delete both and begin anew"
        )
    return card


def write_dialogues(
    path: Path,
    dialogist: Dialogist,
    card: Card,
    tokens: int,
    on_text: OnText,
    on_part: OnPart,
) -> Card:
    """Write parts until the file has so many answer tokens.

    Args:
        path: the file, compressed where its name ends in ``.gz``.
        dialogist: writes them.
        card: of the file, as ``open_card`` gives it.
        tokens: answer tokens that are wanted; the last part may exceed them.
        on_text: called as answers are written.
        on_part: called as parts are finished, of which some answers are left out.

    Raises:
        FalconLabError: something cannot be written, or the target writes nothing that is left.
    """
    card.write(path)
    write_behind(path, card.bytes, b"")  # behind it is what a kill has left of a part
    statistics, seen, barren = Statistics(), set[str](), 0
    lines = _lines(path)
    while True:
        for line in lines:
            statistics.add(line)
            seen |= keys_of(line)
        statistics.describe(card)
        card.write(path)
        on_part(card)
        if card.answer_tokens >= tokens:
            return card
        with Stopwatch() as watch:
            part = dialogist.part(card.parts, seen, on_text)
        barren = 0 if part.lines else barren + 1
        if barren == BARREN:
            _refuse_barren(card, part)
        card.bytes = write_behind(path, card.bytes, _block(path, part.lines))
        card.parts += 1
        card.seconds = round(card.seconds + watch.wall, 3)
        for reason, count in part.dropped.items():
            card.dropped[reason] = card.dropped.get(reason, 0) + count
        card.overlaps = [*card.overlaps, *part.overlaps][:SHOWN]
        lines = part.lines


def _lines(path: Path) -> list[Line]:
    """Return the dialogues of a file.

    Raises:
        FalconLabError: a line is none that we wrote.
    """
    found = []
    for number, value in read_jsonl(path):
        line = fitting(value, Line)
        if line is None:
            raise FalconLabError(
                f"{path}:{number}: is no dialogue as falcon-lab writes them, so that the file "
                "cannot be continued; give another --out"
            )
        found.append(line)
    return found


def _block(path: Path, lines: Sequence[Line]) -> bytes:
    """Return lines as they are appended: the same bytes whenever they are written."""
    text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    return gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()


BARREN = 3
"""Parts in a row of which nothing is left, after which the target is given up."""


def _refuse_barren(card: Card, part: Part) -> None:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(part.dropped.items()))
    raise FalconLabError(
        f"target {card.target.name} wrote {BARREN} parts of which no dialogue is left (of the "
        f"last: {reasons}); it may be no instruct model, or --temperature too high or low"
    )
