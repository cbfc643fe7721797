"""How often a model finds the right ending of a multiple-choice question the likeliest.

Both figures are those of lm-evaluation-harness (EleutherAI; ``multiple_choice``): ``acc`` compares
the log-likelihoods of the endings, ``acc_norm`` the same divided by an ending's characters. An
ending is put behind its context with one space, and its tokens are those that the whole text has
behind the tokens of the context.

A question is one sequence: the context once, and behind it the endings, none of which attends to
another one.

Shapes: B questions, N tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, mean

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.bars import BAR_DELAY, Bar
from falcon_lab.errors import FalconLabError
from falcon_lab.model.masks import causal_mask
from falcon_lab.model.target import Target
from falcon_lab.pretraining.questions import Question
from falcon_lab.pretraining.tuned import PairedShare

PADDING, CONTEXT = -1, 0
"""Parts of a sequence; the endings are 1, 2, …"""

TOKENS = 4096
"""Of a pass, padding counted."""

ROWS = 256
"""Of which logits are made at a time."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Encoded:
    """A question as tokens.

    Attributes:
        context: of all endings.
        endings: of each one its own tokens.
    """

    context: list[int]
    endings: list[list[int]]

    def __len__(self) -> int:
        return len(self.context) + sum(map(len, self.endings))

    @property
    def longest(self) -> int:
        """Return the tokens of the context with its longest ending."""
        return len(self.context) + max(map(len, self.endings))


@dataclass(frozen=True)
class Answers:
    """Which questions were answered right, by each figure, in their order."""

    acc: list[bool]
    acc_norm: list[bool]


def encoded(questions: Sequence[Question], target: Target) -> list[Encoded]:
    """Return questions as tokens of a target.

    Raises:
        FalconLabError: one is longer than the target reads, or an ending has no token; names file
            and line.
    """
    return [_encoded(question, target) for question in questions]


def _encoded(question: Question, target: Target) -> Encoded:
    context = question.line.ctx.rstrip()
    texts = [context, *(f"{context} {ending.lstrip()}" for ending in question.line.endings)]
    end = target.tokenizer.eos_token_id
    tokens = [
        each[:-1] if each[-1:] == [end] else each
        for each in target.tokenizer(texts, verbose=False)["input_ids"]
    ]
    before = tokens[0]
    found = Encoded(before, [each[len(before) :] for each in tokens[1:]])
    if not before or not all(found.endings):
        raise FalconLabError(
            f"{question.source}: the context or an ending is no token of {target.name}; take the "
            "line out"
        )
    if found.longest > target.max_positions:
        raise FalconLabError(
            f"{question.source}: has {found.longest} tokens, and {target.name} reads "
            f"{target.max_positions}; take the line out"
        )
    return found


def answers(target: Target, questions: Sequence[Question], whose: str = "answers") -> Answers:
    """Have a target answer questions, some in a pass, with a progress bar.

    Raises:
        FalconLabError: as ``encoded``.
    """
    asked = encoded(questions, target)
    acc, acc_norm = ([False] * len(asked) for _ in range(2))
    with Bar(total=len(asked), desc=whose, unit="question", delay=BAR_DELAY, leave=False) as bar:
        for numbers in together(asked):
            found = log_likelihoods(target, [asked[number] for number in numbers])
            for number, sums in zip(numbers, found, strict=True):
                acc[number], acc_norm[number] = is_right(questions[number], sums)
            bar.update(len(numbers))
    return Answers(acc, acc_norm)


def is_right(question: Question, sums: Sequence[float]) -> tuple[bool, bool]:
    """Return whether the right ending is the likeliest, as a whole and for each character."""
    line = question.line
    means = [total / len(ending) for total, ending in zip(sums, line.endings, strict=True)]
    return sums.index(max(sums)) == line.label, means.index(max(means)) == line.label


def together(asked: Sequence[Encoded], tokens: int = TOKENS) -> Iterator[list[int]]:
    """Yield the numbers of questions that share a pass: of about one length, and not too many."""
    group: list[int] = []
    for number in sorted(range(len(asked)), key=lambda number: -len(asked[number])):
        if group and (len(group) + 1) * len(asked[group[0]]) > tokens:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


@torch.inference_mode()
def log_likelihoods(target: Target, asked: Sequence[Encoded]) -> list[list[float]]:
    """Return the log-likelihood of every ending in nats, in one pass."""
    sequences = [_sequence(each) for each in asked]
    tokens, parts, positions = (
        pad_sequence([each[i] for each in sequences], batch_first=True, padding_value=padding)
        for i, padding in enumerate((0, PADDING, 0))
    )
    tokens, parts, positions = (each.to(target.device) for each in (tokens, parts, positions))
    hidden = target.backbone(tokens=tokens, positions=positions, mask=_mask(parts))
    return [
        _sums(target, of_question[: len(each)], each)
        for of_question, each in zip(hidden, asked, strict=True)
    ]


def _sequence(question: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    """Return a question's tokens, the part that each belongs to, and their positions."""
    tokens, parts = list(question.context), [CONTEXT] * len(question.context)
    positions = list(range(len(question.context)))
    for number, ending in enumerate(question.endings, start=1):
        tokens += ending
        parts += [number] * len(ending)
        positions += range(len(question.context), len(question.context) + len(ending))
    return torch.tensor(tokens), torch.tensor(parts), torch.tensor(positions)


def _mask(parts: Tensor) -> Tensor:
    """Return ``[B, N, N]``: all attend to what of the context and of their own part is before."""
    seen = (parts[:, :, None] == parts[:, None, :]) | (parts == CONTEXT)[:, None, :]
    return seen & causal_mask(parts.shape[1], 0, parts.device)


def _sums(target: Target, hidden: Tensor, question: Encoded) -> list[float]:
    """Return the log-likelihoods of a question's endings from its hidden states."""
    rows: list[int] = []
    at = len(question.context)
    for ending in question.endings:  # each token is predicted by the one before it in its text
        rows += [len(question.context) - 1, *range(at, at + len(ending) - 1)]
        at += len(ending)
    labels = torch.tensor([token for ending in question.endings for token in ending])
    losses = [
        functional.cross_entropy(target.head(states).float(), wanted, reduction="none")
        for states, wanted in zip(
            hidden[rows].split(ROWS), labels.to(hidden.device).split(ROWS), strict=True
        )
    ]
    of_endings = torch.cat(losses).double().cpu().split([len(each) for each in question.endings])
    return [-float(each.sum()) for each in of_endings]


def paired(parent: Sequence[bool], tuned: Sequence[bool]) -> PairedShare:
    """Compare the shares of two models that answered the same questions.

    The interval of the difference is the adjusted Wald interval for paired proportions of Bonett
    and Price (*Journal of Educational and Behavioral Statistics* 37(4), 2012): only questions that
    one of the two alone answers right widen it, and each kind counts one more than there are.
    """
    gained = sum(after and not before for before, after in zip(parent, tuned, strict=True))
    lost = sum(before and not after for before, after in zip(parent, tuned, strict=True))
    count = len(parent) + 2
    up, down = (gained + 1) / count, (lost + 1) / count
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * sqrt((up + down - (up - down) ** 2) / count)
    return PairedShare(
        parent=mean(parent),
        tuned=mean(tuned),
        difference=mean(tuned) - mean(parent),
        low=up - down - half,
        high=up - down + half,
    )
