"""A back-off model of three tokens: counted on a corpus, written and read as ARPA files.

    python -m falcon_lab_diffusion trigrams TARGET CORPUS trigrams.arpa

Absolute discounting: what is taken from every n-gram seen is shared among the tokens that were
not seen behind its context, in the proportions of the model of one token less.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, write_atomically

DISCOUNT = 0.75
ORDER = 3
UNKNOWN = math.log(1e-10)
"""Of a token that the model has never seen."""
LONGEST = 4096
"""Bytes of a line that can be an n-gram's."""
LN10 = math.log(10)

Gram = tuple[int, ...]


@dataclass(slots=True)
class Trigrams:
    """Hold n-grams with their log-probabilities, and the weights of backing off from them.

    Attributes:
        log_p: natural logarithms, by n-gram.
        back_off: natural logarithms, by context; 0 where there is none.
        unknown: log-probability of a token without a unigram.
    """

    log_p: dict[Gram, float] = field(default_factory=dict)
    back_off: dict[Gram, float] = field(default_factory=dict)
    unknown: float = UNKNOWN

    def log_probability(self, before: Sequence[int], token: int) -> float:
        """Return the natural logarithm of a token's probability behind the newest two."""
        context, weight = tuple(before[-(ORDER - 1) :]), 0.0
        while True:
            found = self.log_p.get((*context, token))
            if found is not None:
                return weight + found
            if not context:
                return weight + self.unknown
            weight += self.back_off.get(context, 0.0)
            context = context[1:]


def count_trigrams(
    texts: Iterable[Sequence[int]], *, least: int = 1, discount: float = DISCOUNT
) -> Trigrams:
    """Count a back-off model on texts of tokens.

    Args:
        texts: the tokens of each.
        least: how often a trigram must be there to be kept.
        discount: D, between 0 and 1.

    Raises:
        FalconLabError: there is no token in the texts.
    """
    counts: list[Counter[Gram]] = [Counter() for _ in range(ORDER)]
    for text in texts:
        tokens = list(text)
        for order, counted in enumerate(counts, start=1):
            counted.update(zip(*(tokens[start:] for start in range(order)), strict=False))
    total = counts[0].total()
    if not total:
        raise FalconLabError("there is nothing to count n-grams of: the texts have no tokens")
    counts[-1] = Counter({gram: n for gram, n in counts[-1].items() if n >= least})
    model = Trigrams({gram: math.log(n / total) for gram, n in counts[0].items()})
    for counted in counts[1:]:
        _add_order(model, counted, discount)
    return model


def _add_order(model: Trigrams, counted: Mapping[Gram, int], discount: float) -> None:
    """Add n-grams of one token more than the model has, and what backing off to it weighs."""
    behind: defaultdict[Gram, list[tuple[Gram, int]]] = defaultdict(list)
    for gram, number in counted.items():
        behind[gram[:-1]].append((gram, number))
    for context, grams in behind.items():
        total = sum(number for _, number in grams)
        seen = sum(math.exp(model.log_probability(context[1:], gram[-1])) for gram, _ in grams)
        left = discount * len(grams) / total
        # Where a context has been followed by every token, nothing is left to back off to.
        whole = 1 - seen <= 1e-12
        for gram, number in grams:
            kept = number if whole else number - discount
            model.log_p[gram] = math.log(kept / total)
        model.back_off[context] = -math.inf if whole else math.log(left / (1 - seen))


# --- files --------------------------------------------------------------------------------------


def write_arpa(model: Trigrams, path: Path) -> None:
    """Write a model as an ARPA file whose words are numbers of tokens.

    Raises:
        FalconLabError: it cannot be written.
    """
    write_atomically(path, "".join(_lines(model)))


def _lines(model: Trigrams) -> Iterator[str]:
    by_order = [sorted(g for g in model.log_p if len(g) == n + 1) for n in range(ORDER)]
    yield "\\data\\\n"
    yield from (f"ngram {order}={len(grams)}\n" for order, grams in enumerate(by_order, start=1))
    for order, grams in enumerate(by_order, start=1):
        yield f"\n\\{order}-grams:\n"
        for gram in grams:
            weight = max(model.back_off.get(gram, 0.0), -99 * LN10)
            tail = f"\t{weight / LN10:.6f}" if weight else ""
            yield f"{model.log_p[gram] / LN10:.6f}\t{' '.join(map(str, gram))}{tail}\n"
    yield "\n\\end\\\n"


def read_arpa(path: Path, tokenizer: Any = None) -> Trigrams:
    """Read an ARPA file of up to three words; longer n-grams are left out.

    Its words are numbers of tokens or, with a tokenizer, tokens of its vocabulary; other words
    (``<s>``) are left out.

    Raises:
        FalconLabError: it cannot be read, or is none.
    """
    model, order, named = Trigrams(), 0, _naming(tokenizer)
    with about(path, "read", also=(UnicodeDecodeError,)), path.open(encoding="utf-8") as file:
        number = 0
        while line := file.readline(LONGEST):
            number += 1
            text = line.strip()
            if text.startswith("\\"):
                order = _section(text)
                if text == "\\end\\":
                    break
            elif order and text:
                _add_line(model, text, order, named, f"{path}, line {number}")
    if not model.log_p:
        raise FalconLabError(
            f"{path}: has no n-grams of this target's tokens; give an ARPA file whose words are "
            "numbers of tokens, or tokens (python -m falcon_lab_diffusion trigrams writes one)"
        )
    return model


def _naming(tokenizer: Any) -> Callable[[str], int | None]:
    vocabulary: Mapping[str, int] = {} if tokenizer is None else tokenizer.get_vocab()

    def token_of(word: str) -> int | None:
        return int(word) if word.isascii() and word.isdigit() else vocabulary.get(word)

    return token_of


def _section(text: str) -> int:
    """Return the order of the n-grams that follow, 0 where these are none of ours."""
    head = text.removeprefix("\\").removesuffix("-grams:")
    return int(head) if head.isdigit() and 1 <= int(head) <= ORDER else 0


def _add_line(
    model: Trigrams, text: str, order: int, named: Callable[[str], int | None], where: str
) -> None:
    parts = text.split()
    try:
        values = [float(part) for part in (parts[0], *parts[order + 1 :])]
        if len(parts) not in (order + 1, order + 2) or any(map(math.isnan, values)):
            raise ValueError(text)
    except ValueError as error:
        raise FalconLabError(
            f"{where}: {text[:60]!r} is no {order}-gram (a logarithm, {order} words, and perhaps "
            "a weight); give an ARPA file"
        ) from error
    gram = tuple(named(word) for word in parts[1 : order + 1])
    if parts[1] == "<unk>" and order == 1:
        model.unknown = values[0] * LN10
    known = [token for token in gram if token is not None]
    if len(known) < order:
        return
    model.log_p[tuple(known)] = values[0] * LN10
    if len(values) > 1:
        model.back_off[tuple(known)] = values[1] * LN10
