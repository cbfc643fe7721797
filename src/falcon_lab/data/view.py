"""A sample as a model meets it, for eyes."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from falcon_lab.data.encoding import encode

if TYPE_CHECKING:
    from falcon_lab.data.documents import Document


def spans(
    document: Document, tokenizer: Any, template: str | None = None
) -> list[tuple[str, bool]]:
    """``(text, learnt)`` of the stretches of a sample, special tokens visible, in order.

    Raises:
        FalconLabError: the sample cannot be encoded, or nothing in it is to be learnt.
    """
    encoded = encode(document, tokenizer, template)
    pairs = zip(encoded.tokens, encoded.loss_mask, strict=True)
    return [
        (str(tokenizer.decode([token for token, _ in group], skip_special_tokens=False)), learnt)
        for learnt, group in groupby(pairs, key=lambda pair: pair[1])
    ]
