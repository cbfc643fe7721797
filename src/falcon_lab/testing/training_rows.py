"""The rows of a training pass, by what they are about.

Shapes: B sequences, R prediction rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import label_rows
from falcon_lab.interfaces import Prediction
from falcon_lab.testing.conversation import Case
from falcon_lab.testing.texts import one_document, random_tokens, training_inputs

Rows = dict[tuple[int, int], list[Tensor]]
"""(newest input, place in the block) of a document -> the logits ``[V]`` that were predicted."""

PHASES = 12
"""Draws of a step's randomness, so that every phase of a block is likely to occur."""


def predict(case: Case, drafter: Any, batch: Batch, number: int = 0) -> Prediction:
    """The training pass, without gradient; ``number`` is of its randomness."""
    inputs = training_inputs(case.target, drafter, batch, case.subject.generator(number))
    with torch.no_grad():
        prediction: Prediction = drafter(inputs)
    return prediction


def logits_of(case: Case, prediction: Prediction) -> Tensor:
    """``[B, R, V]``: the drafter's own, or those of the head that reads its rows."""
    if prediction.logits is not None:
        return prediction.logits
    rows = prediction.features if prediction.hidden is None else prediction.hidden
    assert rows is not None
    if prediction.head is None:
        return case.target.head(rows.to(case.target.dtype))
    with torch.no_grad():
        logits = prediction.head(rows.flatten(0, 1), prediction.slot.flatten())
    return logits.unflatten(0, rows.shape[:2])


def table(case: Case, batch: Batch, prediction: Prediction) -> dict[tuple[int, int], Rows]:
    """The rows that count, by sequence and document, at their places in the document."""
    found: dict[tuple[int, int], Rows] = {}
    logits, valid = logits_of(case, prediction), label_rows(batch, prediction).valid
    for sequence, row in valid.nonzero().tolist():
        source = int(prediction.source[sequence, row])
        document = int(batch.documents[sequence, source])
        key = int(batch.positions[sequence, source]), int(prediction.slot[sequence, row])
        of_one = found.setdefault((sequence, document), {})
        of_one.setdefault(key, []).append(logits[sequence, row])
    return found


def alone(case: Case, drafter: Any, tokens: Tensor) -> Rows:
    """What is predicted of a document by itself, under many draws of the randomness."""
    batch, rows = one_document(tokens), Rows()
    for number in range(PHASES):
        for of_one in table(case, batch, predict(case, drafter, batch, number)).values():
            for key, found in of_one.items():
                rows.setdefault(key, []).extend(found)
    return rows


def documents(case: Case, *lengths: int, number: int = 30) -> list[Tensor]:
    """Random documents of these lengths, ``[n]`` long each; another ``number``, other ones."""
    generator = case.subject.generator(number)
    return [random_tokens(case.target, length, generator) for length in lengths]
