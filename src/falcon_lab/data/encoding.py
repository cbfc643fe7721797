"""Documents as tokens with their loss mask, and a byte-level BPE tokenizer trained from scratch.

Shapes: T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from falcon_lab.data.documents import render
from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from falcon_lab.data.documents import Document

END_OF_TEXT = "<|endoftext|>"
"""Token 0: ends a document, and pads."""
TOGETHER = 64
"""Texts that go to the tokenizer in one call."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) on ``texts``.

    Any text round-trips: all 256 bytes are in the vocabulary. The same texts in the same order
    give the same tokenizer.

    Args:
        texts: documents; merges are learned from them.
        vocabulary: entries at the most, the special token and the 256 bytes among them.

    Raises:
        FalconLabError: ``vocabulary`` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < 257:
        raise FalconLabError(f"vocabulary is {vocabulary}; a byte-level BPE needs at least 257")
    tokenizer = Tokenizer(models.BPE())
    # Python's indentation is part of the language: no prefix space, and no space is dropped.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as tokens.

    Attributes:
        tokens: T token ids.
        loss_mask: T truth values: whether the token counts in the loss.
    """

    tokens: list[int]
    loss_mask: list[bool]

    def __len__(self) -> int:
        return len(self.tokens)


def encode(document: Document, tokenizer: Any, template: str | None = None) -> Encoded:
    """Encode one document.

    The loss mask has all of a text, which ends with EOS, and of a chat the assistant's answers
    with the tokens that end its turns.

    Args:
        document: a text or a chat.
        tokenizer: of Hugging Face.
        template: chat template (Jinja) in place of the tokenizer's own.

    Raises:
        FalconLabError: the chat cannot be rendered, or its loss mask is empty; names the document
            and its place.
    """
    if document.messages is None:
        return _text(tokenizer(document.text or "", verbose=False)["input_ids"], tokenizer)
    rendered = render(document, tokenizer, template)
    tokens, mask = _mask(rendered.text, rendered.answers, tokenizer, document)
    if not any(mask):
        raise FalconLabError(
            f"sample {document.id} ({document.source}): nothing in it counts in the loss; the chat "
            "template shows no answer of an assistant"
        )
    return Encoded(tokens, mask)


def encode_all(
    documents: Iterable[Document], tokenizer: Any, template: str | None = None
) -> Iterator[Encoded]:
    """Encode documents in their order; texts go through the tokenizer many at a time."""
    rest = iter(documents)
    while group := list(islice(rest, TOGETHER)):
        if any(document.messages is not None for document in group):
            yield from (encode(document, tokenizer, template) for document in group)
        else:
            texts = [document.text or "" for document in group]
            for tokens in tokenizer(texts, verbose=False)["input_ids"]:
                yield _text(tokens, tokenizer)


def chunks(encoded: Encoded, length: int) -> Iterator[Encoded]:
    """Yield the document in pieces of at most ``length`` tokens, unless their loss mask is empty.

    Each piece is a document of its own from here on, and does not attend to those before it.
    """
    for start in range(0, len(encoded), length):
        mask = encoded.loss_mask[start : start + length]
        if any(mask):
            yield Encoded(encoded.tokens[start : start + length], mask)


def spans(
    document: Document, tokenizer: Any, template: str | None = None
) -> list[tuple[str, bool]]:
    """Return ``(text, in the loss)`` of the stretches of a document, special tokens visible.

    Raises:
        FalconLabError: as ``encode``.
    """
    encoded = encode(document, tokenizer, template)
    pairs = zip(encoded.tokens, encoded.loss_mask, strict=True)
    return [
        (str(tokenizer.decode([token for token, _ in group], skip_special_tokens=False)), counts)
        for counts, group in groupby(pairs, key=lambda pair: pair[1])
    ]


def _text(tokens: list[int], tokenizer: Any) -> Encoded:
    end = tokenizer.eos_token_id
    ended = [*tokens, end] if end is not None and tokens[-1:] != [end] else list(tokens)
    return Encoded(ended, [True] * len(ended))


def _mask(
    text: str, answers: list[tuple[int, int]], tokenizer: Any, document: Document
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a rendered chat, and which of them begin inside an answer."""
    # The template wrote the special tokens already.
    options = {"add_special_tokens": False, "verbose": False}
    if not getattr(tokenizer, "is_fast", False):
        return _mask_by_prefixes(text, answers, tokenizer, document)
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    mask = [
        any(first <= start and start < last for first, last in answers)
        for start, _ in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), mask


def _mask_by_prefixes(
    text: str, answers: list[tuple[int, int]], tokenizer: Any, document: Document
) -> tuple[list[int], list[bool]]:
    """Do the same with a tokenizer that gives no character offsets."""

    def tokens_of(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    tokens = tokens_of(text)
    mask = [False] * len(tokens)
    for span in answers:
        before, through = (tokens_of(text[:end]) for end in span)
        if tokens[: len(before)] != before or tokens[: len(through)] != through:
            raise FalconLabError(
                f"sample {document.id} ({document.source}): the tokenizer joins what an assistant "
                "writes with what stands around it, so that the loss mask cannot be cut there"
            )
        mask[len(before) : len(through)] = [True] * (len(through) - len(before))
    return tokens, mask
