"""What a training row sees: inputs up to its source, of its own document, as in drafting.

Shapes: T rows, k block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import label_rows
from falcon_lab.interfaces import DrafterInputs, Frontier, Prediction
from falcon_lab.testing.conversation import TOLERANCE, Case, Conversation, difference
from falcon_lab.testing.texts import one_document, packed, random_tokens, training_inputs
from falcon_lab.testing.training_rows import PHASES, alone, documents, logits_of, predict, table


def check_that_nothing_leaks(case: Case) -> None:
    """A row knows no input newer than its source."""
    drafter = case.fresh()
    batch = packed([documents(case, 16)])
    other = packed([documents(case, 16, number=32)])
    base, changed = (
        training_inputs(case.target, drafter, each, case.subject.generator(4))
        for each in (batch, other)
    )
    passes = _passes(case, drafter, base)
    for source in range(base.tokens.shape[1] - 1):
        mixed = _mixed(base, changed, source)
        for number, (ours, expected) in enumerate(
            zip(_passes(case, drafter, mixed), passes, strict=True)
        ):
            valid = label_rows(batch, expected).valid
            if number == 0:
                rows = valid & (expected.source <= source)
            else:  # a later pass reads the true tokens up to the one before its label
                rows = valid & (expected.label - expected.slot - 1 <= source)
            apart = difference(logits_of(case, ours)[rows], logits_of(case, expected)[rows])
            case.subject.expect(
                apart <= TOLERANCE,
                f"rows whose source is {source} or older, when newer inputs change",
                expected="the same prediction",
                found=f"a difference of {apart:.2g}",
                fix="a row sees inputs up to its source alone; else it reads its own label in "
                "training, and fails in drafting. Look at the mask, and at shifts by one",
            )


def _passes(case: Case, drafter: Any, inputs: DrafterInputs) -> list[Prediction]:
    """The training pass, and the second one of a drafter that unrolls."""
    given = replace(inputs, generator=case.subject.generator(4))
    with torch.no_grad():
        if drafter.unrolls:
            return list(islice(drafter.unroll(given), 2))
        return [drafter(given)]


def _mixed(base: DrafterInputs, other: DrafterInputs, source: int) -> DrafterInputs:
    """Rows up to ``source`` of one, newer ones of the other."""

    def mix(ours: Tensor, theirs: Tensor) -> Tensor:
        return torch.cat((ours[:, : source + 1], theirs[:, source + 1 :]), 1)

    taps = None
    if base.taps is not None and other.taps is not None:
        taps = mix(base.taps, other.taps)
    return replace(
        base,
        tokens=mix(base.tokens, other.tokens),
        features=mix(base.features, other.features),
        taps=taps,
    )


def check_that_documents_are_separate(case: Case) -> None:
    """Packed equals alone."""
    together = documents(case, 11, 13, 9)
    _check_against_alone(
        case,
        packed([together]),
        [together],
        "a document packed among others",
        "a row sees inputs of its own document alone, and its position counts from there",
    )


def check_that_sequences_are_separate(case: Case) -> None:
    """B sequences are B times one."""
    sequences = [documents(case, 14, number=33 + number) for number in range(3)]
    _check_against_alone(
        case,
        packed(sequences),
        sequences,
        "a sequence of a batch of three",
        "sequences of a batch share nothing: look for a view that mixes B and T, and for "
        "recurrent layers without batch_first",
    )


def _check_against_alone(
    case: Case, batch: Batch, sequences: Sequence[Sequence[Tensor]], what: str, fix: str
) -> None:
    drafter = case.fresh()
    expected = {
        (number, place): alone(case, drafter, tokens)
        for number, documents in enumerate(sequences)
        for place, tokens in enumerate(documents)
    }
    compared = 0
    for number in range(3):
        for place, rows in table(case, batch, predict(case, drafter, batch, number)).items():
            for key, found in rows.items():
                candidates = expected[place].get(key, [])
                compared += bool(candidates)
                for one in found if candidates else ():
                    apart = min(difference(one, other) for other in candidates)
                    case.subject.expect(
                        apart <= TOLERANCE,
                        f"{what} (newest row {key[0]}, slot {key[1]})",
                        expected="what is predicted of it alone",
                        found=f"a difference of {apart:.2g}",
                        fix=fix,
                    )
    case.subject.expect(
        compared > 0,
        what,
        expected="some of the rows that it has alone",
        found="none",
        fix="which rows there are must follow from the document and inputs.generator",
    )


def check_that_training_is_drafting(case: Case) -> None:
    """A row of training is a row of drafting, with the same newest input."""
    drafter = case.fresh()
    tokens = random_tokens(case.target, 15, case.subject.generator(35))
    batch, text = one_document(tokens), case.read(drafter, tokens)
    compared = 0
    for number in range(PHASES):
        inputs = training_inputs(case.target, drafter, batch, case.subject.generator(number))
        with torch.no_grad():
            passes = _first_passes(drafter, inputs)
        rows = [table(case, batch, each).get((0, 0), {}) for each in passes]
        for source in sorted({source for source, _ in rows[0]}):
            talk = Conversation(drafter, text)
            talk.observe(source + 1)
            for each, output in zip(rows, _true_passes(talk, len(rows)), strict=False):
                for slot, logits in enumerate(output.logits[0]):
                    for trained in each.get((source, slot), ()):
                        case.same(
                            f"slot {slot} of the block behind row {source}, drafted and trained",
                            logits,
                            trained,
                            "drafting after rows 0..t must predict what training predicts in the "
                            "rows with source t: look at positions, at how rows are fused, and at "
                            "where blocks lie",
                        )
                        compared += 1
    case.subject.expect(
        compared > 0,
        "rows of training that drafting has too",
        expected="some",
        found="none",
        fix="a row's source is the newest input that it sees, as drafting would see it",
    )


def _first_passes(drafter: Any, inputs: DrafterInputs) -> list[Prediction]:
    return list(islice(drafter.unroll(inputs), 3)) if drafter.unrolls else [drafter(inputs)]


def _true_passes(talk: Conversation, count: int) -> Iterator[Any]:
    """Passes of a round that drafts the tokens which really follow, one block at a time."""
    block, most = talk.drafter.block, talk.drafter.max_passes or count
    frontier: Frontier | None = None
    for number in range(min(count, most)):
        output = talk.draft(frontier)
        yield output
        start = talk.known + 1 + number * block
        tokens = talk.text.tokens[start : start + block]
        if len(tokens) < block:
            return
        frontier = Frontier(tokens[None], torch.zeros(1, dtype=torch.long))


CHECKS: list[tuple[str, Any]] = [
    ("that no label leaks", check_that_nothing_leaks),
    ("that packed documents are separate", check_that_documents_are_separate),
    ("that the sequences of a batch are separate", check_that_sequences_are_separate),
    ("that training is drafting", check_that_training_is_drafting),
]
