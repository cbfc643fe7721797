"""A byte-level BPE tokenizer of one's own, for targets that are trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
"""Token 0: ends a document, and pads."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) on ``texts``.

    Any text round-trips: all 256 bytes are in the vocabulary. The same texts in the same order
    give the same tokenizer.

    Args:
        texts: documents; the tokenizer learns merges from them.
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
