"""What the rows of a training pass depend on: inputs up to their source, of their own document.

Shapes: B sequences, R prediction rows, T tokens, k block, V vocabulary.
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
from falcon_lab.testing.drafter_case import TOLERANCE, Case, DraftedSequence, difference
from falcon_lab.testing.targets import one_document, packed, random_tokens, training_inputs

Rows = dict[tuple[int, int], list[Tensor]]
"""(newest input, place in the block) of a document -> the logits ``[V]`` that were predicted."""

PHASES = 12
"""Draws of a step's randomness, so that every phase of a block is likely to occur."""


def predict(case: Case, drafter: Any, batch: Batch, number: int = 0) -> Prediction:
    """Run the training pass without gradient; ``number`` seeds its randomness."""
    inputs = training_inputs(case.target, drafter, batch, case.tested.generator(number))
    with torch.no_grad():
        prediction: Prediction = drafter(inputs)
    return prediction


def logits_of(case: Case, prediction: Prediction) -> Tensor:
    """Return ``[B, R, V]``: the drafter's logits, or those of the head that reads its rows.

    Where that is the target's, it has all its rows here, and those outside of a draft vocabulary
    are taken out afterwards.
    """
    if prediction.logits is not None:
        return case.over_target(prediction.logits)
    rows = prediction.features if prediction.hidden is None else prediction.hidden
    assert rows is not None
    if prediction.head is None:
        whole = case.target.head(rows.to(case.target.dtype))
        words = case.vocabulary
        return whole if words is None else case.over_target(whole[..., words.ids])
    with torch.no_grad():
        logits = prediction.head(rows.flatten(0, 1), prediction.slot.flatten())
    return case.over_target(logits).unflatten(0, rows.shape[:2])


def table(case: Case, batch: Batch, prediction: Prediction) -> dict[tuple[int, int], Rows]:
    """Sort the rows that count by sequence and document, and by their places in the document."""
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
    """Return the rows of a document alone, under many draws of the randomness."""
    batch, rows = one_document(tokens), Rows()
    for number in range(PHASES):
        for of_one in table(case, batch, predict(case, drafter, batch, number)).values():
            for key, found in of_one.items():
                rows.setdefault(key, []).extend(found)
    return rows


def documents(case: Case, *lengths: int, number: int = 30) -> list[Tensor]:
    """Make random documents of these lengths, ``[n]`` long each, seeded by ``number``."""
    generator = case.tested.generator(number)
    return [random_tokens(case.target, length, generator) for length in lengths]


def check_that_nothing_leaks(case: Case) -> None:
    """Check that a row does not depend on inputs newer than its source."""
    drafter = case.fresh()
    batch = packed([documents(case, 16)])
    other = packed([documents(case, 16, number=32)])
    base, changed = (
        training_inputs(case.target, drafter, each, case.tested.generator(4))
        for each in (batch, other)
    )
    passes = _passes(case, drafter, base)
    for source in range(base.tokens.shape[1] - 1):
        mixed = _mixed(base, changed, source, ahead=drafter.lower_layers > 0)
        for number, (ours, expected) in enumerate(
            zip(_passes(case, drafter, mixed), passes, strict=True)
        ):
            valid = label_rows(batch, expected).valid
            if number == 0:
                rows = valid & (expected.source <= source)
            else:  # a later pass reads the true tokens up to the one before its label
                rows = valid & (expected.label - expected.slot - 1 <= source)
            apart = difference(logits_of(case, ours)[rows], logits_of(case, expected)[rows])
            case.tested.expect(
                apart <= TOLERANCE,
                f"rows whose source is {source} or older, when newer inputs change",
                expected="the same prediction",
                found=f"a difference of {apart:.2g}",
                fix="a row depends on inputs up to its source alone; else it reads its label in "
                "training, and fails in drafting. Check the mask, and shifts by one",
            )


def _passes(case: Case, drafter: Any, inputs: DrafterInputs) -> list[Prediction]:
    """Run the training pass, and the second one of a drafter that unrolls."""
    given = replace(inputs, generator=case.tested.generator(4))
    with torch.no_grad():
        if drafter.unrolls:
            return list(islice(drafter.unroll(given), 2))
        return [drafter(given)]


def _mixed(base: DrafterInputs, other: DrafterInputs, source: int, *, ahead: bool) -> DrafterInputs:
    """Take inputs up to ``source`` from one, newer ones from the other.

    Args:
        base: the one.
        other: the other.
        source: the newest input that is taken from the one.
        ahead: whether the hidden states at its token are, too: a drafter that runs the lower
            layers over draft tokens knows these before the target does.
    """

    def mix(ours: Tensor, theirs: Tensor, first: int = source + 1) -> Tensor:
        return torch.cat((ours[:, :first], theirs[:, first:]), 1)

    taps = None
    if base.taps is not None and other.taps is not None:
        taps = mix(base.taps, other.taps, source + 1 + ahead)
    return replace(
        base,
        tokens=mix(base.tokens, other.tokens),
        features=mix(base.features, other.features),
        taps=taps,
    )


def check_that_documents_are_separate(case: Case) -> None:
    """Check that a packed document gives the rows that it gives alone."""
    together = documents(case, 11, 13, 9)
    _check_against_alone(
        case,
        packed([together]),
        [together],
        "a document packed among others",
        "a row depends on inputs of its own document alone, and its position counts from there",
    )


def check_that_sequences_are_separate(case: Case) -> None:
    """Check that B sequences give the rows of B times one."""
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
                    case.tested.expect(
                        apart <= TOLERANCE,
                        f"{what} (newest row {key[0]}, slot {key[1]})",
                        expected="what is predicted of it alone",
                        found=f"a difference of {apart:.2g}",
                        fix=fix,
                    )
    case.tested.expect(
        compared > 0,
        what,
        expected="some of the rows that it has alone",
        found="none",
        fix="which rows there are must follow from the document and inputs.generator",
    )


def check_that_training_is_drafting(case: Case) -> None:
    """Check that a row of training is what drafting predicts from the same newest input."""
    drafter = case.fresh()
    tokens = random_tokens(case.target, 15, case.tested.generator(35))
    batch, text = one_document(tokens), case.read(drafter, tokens)
    compared = 0
    for number in range(PHASES):
        inputs = training_inputs(case.target, drafter, batch, case.tested.generator(number))
        with torch.no_grad():
            passes = _first_passes(drafter, inputs)
        rows = [table(case, batch, each).get((0, 0), {}) for each in passes]
        for source in sorted({source for source, _ in rows[0]}):
            drafted = DraftedSequence(drafter, text)
            if drafter.max_auxiliary and source:  # it may say nothing without a round before
                drafted.observe(source)
                drafted.observe_round()
            else:
                drafted.observe(source + 1)
            for each, output in zip(rows, _true_passes(drafted, len(rows)), strict=False):
                for slot, logits in enumerate(output.target_logits[0]):
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
    case.tested.expect(
        compared > 0,
        "rows of training that drafting has too",
        expected="some",
        found="none",
        fix="a row's source is the newest input that it depends on, as in drafting",
    )


def _first_passes(drafter: Any, inputs: DrafterInputs) -> list[Prediction]:
    return list(islice(drafter.unroll(inputs), 3)) if drafter.unrolls else [drafter(inputs)]


def _true_passes(drafted: DraftedSequence, count: int) -> Iterator[Any]:
    """Draft the passes of a round along the tokens that really follow, a block at a time."""
    block, most = drafted.drafter.block, drafted.drafter.max_passes or count
    frontier: Frontier | None = None
    for number in range(min(count, most)):
        output = drafted.draft(frontier)
        yield output
        start = drafted.known + 1 + number * block
        tokens = drafted.text.tokens[start : start + block]
        if len(tokens) < block:
            return
        frontier = Frontier(tokens[None], torch.zeros(1, dtype=torch.long))


def check_that_later_passes_are_trained(case: Case) -> None:
    """Check that a later pass drafts as training predicts from the drafter's own features.

    One that unrolls says itself what its later passes are, and was compared with that.
    """
    drafter = case.fresh()
    block, passes = drafter.block, min(3, drafter.max_passes or 3)
    if drafter.unrolls or drafter.taps or passes == 1:
        return
    tokens = random_tokens(case.target, 9 + passes * block, case.tested.generator(36))
    batch, text = one_document(tokens), case.read(drafter, tokens)
    for number in range(4):
        first = predict(case, drafter, batch, number)
        known = {source for source, _ in table(case, batch, first).get((0, 0), {})}
        begins = [s for s in sorted(known) if {s + block * n for n in range(passes)} <= known]
        if begins:
            drafted = DraftedSequence(drafter, text)
            drafted.observe(begins[len(begins) // 2] + 1)
            _compare_later_passes(case, drafted, batch, passes, number)


def _compare_later_passes(
    case: Case, drafted: DraftedSequence, batch: Batch, passes: int, number: int
) -> None:
    """Compare passes along the text with first ones that read what the one before predicted."""
    drafter = drafted.drafter
    inputs = training_inputs(case.target, drafter, batch, case.tested.generator(number))
    for later, output in enumerate([*_true_passes(drafted, passes)]):
        source = drafted.known - 1 + later * drafter.block
        with torch.no_grad():
            prediction = drafter(replace(inputs, generator=case.tested.generator(number)))
        rows = table(case, batch, prediction).get((0, 0), {})
        for slot, logits in enumerate(output.target_logits[0] if later else ()):
            for trained in rows.get((source, slot), ()):
                case.same(
                    f"slot {slot} in pass {later + 1} of a round, drafted and trained",
                    logits,
                    trained,
                    "a later pass predicts what training predicts from the draft tokens and the "
                    "features that the pass before has predicted: look at positions, of drafted "
                    "and of observed tokens; a drafter whose later passes are anything else says "
                    "what they are by unroll()",
                )
        if "features" in drafter.needs:
            if prediction.features is None:
                return
            own = label_rows(batch, prediction).valid & (prediction.source == source)
            features = inputs.features.clone()
            features[0, prediction.label[own]] = prediction.features[own].to(features)
            inputs = replace(inputs, features=features)


CHECKS: list[tuple[str, Any]] = [
    ("that no label leaks", check_that_nothing_leaks),
    ("that packed documents are separate", check_that_documents_are_separate),
    ("that the sequences of a batch are separate", check_that_sequences_are_separate),
    ("that training is drafting", check_that_training_is_drafting),
    ("that later passes are trained ones", check_that_later_passes_are_trained),
]
