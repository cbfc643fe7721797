"""The checks of a drafter with weights: a training step, and the drafter on disk.

Shapes: B sequences, T tokens, R prediction rows, k block, V vocabulary, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from falcon_lab.config.schema import DistillationConfig
from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import label_rows
from falcon_lab.distill.step import DistillationStep
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Prediction, Reveal
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import FalconObjectiveConfig
from falcon_lab.testing.drafter_case import Case, DraftedSequence
from falcon_lab.testing.drafter_rows import documents, logits_of, predict
from falcon_lab.testing.targets import packed, read, training_inputs

SOLVED = 0.03
"""Relative difference between solutions of one linear system whose sums, in float32, were added up
in another order."""


def check_prediction(case: Case) -> None:
    """Check shapes, labels, sources, slots and groups."""
    drafter = case.fresh()
    batch = packed([documents(case, 9, 12), documents(case, 9, 12, number=31)])
    prediction = predict(case, drafter, batch)
    tested, target, block = case.tested, case.target, drafter.block
    tested.expect(
        any(each is not None for each in (prediction.features, prediction.logits))
        or (prediction.hidden is not None and prediction.head is not None),
        "Prediction",
        expected="features, logits, or hidden rows and the head that reads them",
        found="neither",
        fix="give what the objective is to compare",
    )
    shape = list(prediction.label.shape)
    sizes = {"features": target.hidden_size, "logits": case.width}
    shapes = {name: [*shape, size] for name, size in sizes.items()}
    shapes |= dict.fromkeys(("source", "slot", "group"), shape)
    for name, expected in shapes.items():
        values = getattr(prediction, name)
        tested.expect(
            len(shape) == 2 and (values is None or list(values.shape) == expected),
            f"the shape of Prediction.{name}",
            expected=f"{expected} beside labels [B, R]",
            found=None if values is None else list(values.shape),
            fix="all parts of a prediction speak of the same R rows of B sequences",
        )
    valid = label_rows(batch, prediction).valid
    tested.expect(
        bool(valid.any()),
        "rows that count",
        expected="some",
        found="none",
        fix="label is a position of the sequence whose target feature the row predicts, and "
        "source the newest input, in one document",
    )
    slot = prediction.slot[valid]
    tested.expect(
        bool(((slot >= 0) & (slot < block)).all()),
        "Prediction.slot",
        expected=f"places in the block, 0 to {block - 1}",
        found=f"{int(slot.min())} to {int(slot.max())}",
        fix="0 is the next token",
    )
    ahead = (prediction.label - prediction.source)[valid] - 1
    tested.expect(
        torch.equal(ahead, slot),
        "Prediction.label",
        expected="source + 1 + slot",
        found=f"source + 1 + {ahead.unique().tolist()} for slots {slot.unique().tolist()}",
        fix="slot j of a block is about the token j + 1 steps below its newest row",
    )
    _check_groups(case, prediction, valid, block)


def _check_groups(case: Case, prediction: Prediction, valid: Tensor, block: int) -> None:
    for sequence in range(valid.shape[0]):
        rows = valid[sequence]
        pairs = torch.stack((prediction.group[sequence, rows], prediction.slot[sequence, rows]), 1)
        case.tested.expect(
            len(pairs.unique(dim=0)) == len(pairs),
            "Prediction.group",
            expected="one row a place of a block",
            found="several rows of one group with the same slot",
            fix=f"a group is a block of up to {block} rows, and no other block has its number",
        )


def check_reproducible(case: Case) -> None:
    """Check that the generator's state decides a step."""
    drafter = case.fresh()
    batch = packed([documents(case, 20)])
    with torch.random.fork_rng(devices=[]):
        first, second = (predict(case, drafter, batch, 3) for _ in range(2))
    case.same(
        "two training passes from one state of the generator",
        logits_of(case, second),
        logits_of(case, first),
        "draw from inputs.generator alone, never from torch's global one",
    )


def check_gradients(case: Case) -> None:
    """Check that every weight gets a gradient and the target none."""
    tested, drafter = case.tested, case.fresh().train()
    # All passes, as each may have weights of its own, and a text that is long enough for the last.
    passes = (drafter.max_passes or 2) if drafter.unrolls else 1
    longest = min(max(14, 6 + passes * drafter.block), case.target.max_positions)
    batch = packed([documents(case, 9, longest), documents(case, 9, longest, number=31)])
    seen = predict(case, drafter, batch)
    feature = 0.0 if seen.features is None else 1.0
    objective = FalconObjective(FalconObjectiveConfig(feature=feature), case.of(drafter))
    config = DistillationConfig(unroll=passes)
    loss, _ = DistillationStep(
        case.target.tapped(drafter.taps),
        drafter,
        objective,
        tested.components.build("schedule", {"name": "none"}, case.of(drafter)),
        config,
        batch,
        (tested.seed,),
    ).train(0.0)
    tested.expect(
        bool(loss.isfinite()) and loss.requires_grad,
        "the loss of a first step",
        expected="a number with a gradient",
        found=f"{float(loss.detach()):.4g}, {'with' if loss.requires_grad else 'without'} one",
        fix="look for nan in the prediction, and for detach or no_grad in forward()",
    )
    loss.backward()
    frozen = list(case.target.model.parameters())
    tested.expect(
        not any(weight.requires_grad or weight.grad is not None for weight in frozen),
        "the frozen target",
        expected="no gradient",
        found="weights that are trained",
        fix="leave the host's weights as they are",
    )
    trained = [(n, weight) for n, weight in drafter.named_parameters() if weight.requires_grad]
    without = [name for name, weight in trained if weight.grad is None or not weight.grad.any()]
    tested.expect(
        not without,
        "weights that a step teaches",
        expected="all of them",
        found=f"no gradient for {', '.join(without)}",
        fix="use them in forward(), detach nothing on the way, or take requires_grad from them",
    )
    broken = [name for name, w in trained if w.grad is not None and not w.grad.isfinite().all()]
    tested.expect(
        not broken,
        "gradients",
        expected="numbers",
        found=f"nan or inf for {', '.join(broken)}",
        fix="look for a masked softmax over nothing, or the root of zero",
    )


def check_first_weights(case: Case) -> None:
    """Check what ``distillation.least_squares`` begins with, where the drafter has a solution.

    It leaves the weights without documents, sets numbers with some, and does not depend on the
    batches that they come in.
    """
    tested = case.tested
    try:
        case.fresh().first_weights()
    except FalconLabError:
        return
    texts = [documents(case, 20, 24, number=50 + 2 * i) for i in range(6)]
    batches = [packed(part) for part in (texts, texts[:4], texts[4:])]

    def begun(*chosen: Batch) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
        drafter = tested.build(case.context).train()  # as a training has it, without noise
        before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
        solution = drafter.first_weights()
        for batch in chosen:
            inputs = training_inputs(case.target, drafter, batch, tested.generator())
            features, _ = read(case.target, batch)
            with torch.no_grad():
                solution.add(inputs, features)
        return solution.assign(), before, drafter.state_dict()

    fix = "let assign() return the rows that add() has taken in, and set weights where there are"
    count, before, after = begun()
    tested.expect(
        not count and all(torch.equal(after[name], before[name]) for name in before),
        "first weights that rest on no document",
        expected="0 rows and the weights as they were",
        found=f"{count} rows",
        fix=fix,
    )
    count, before, once = begun(batches[0])
    changed = [name for name in before if not torch.equal(once[name], before[name])]
    tested.expect(
        count > 0 and bool(changed),
        "first weights that rest on documents",
        expected="some rows, and other weights than before",
        found=f"{count} rows, and {len(changed)} tensors that have changed",
        fix=fix,
    )
    broken = [name for name in changed if not bool(once[name].isfinite().all())]
    tested.expect(
        not broken,
        "first weights",
        expected="numbers",
        found=f"nan or inf in {', '.join(broken)}",
        fix="look for a system without a unique solution; a ridge gives it one",
    )
    _, _, twice = begun(*batches[1:])
    apart = {
        name: float((twice[name] - once[name]).norm() / once[name].norm().clamp_min(1e-6))
        for name in changed
    }
    worst = max(apart, key=lambda name: apart[name])
    tested.expect(
        apart[worst] <= SOLVED,
        "first weights of documents that come in two batches",
        expected="those of the same documents in one",
        found=f"{worst} that is off by {apart[worst]:.2g} of its length",
        fix="sum up over all calls of add(), and divide in assign() alone",
    )


def check_glances(case: Case) -> None:
    """Check that labels which are not shown do not count, and that rows stay what they are."""
    drafter = case.fresh()
    batch = packed([documents(case, 10, 14)])

    def inputs() -> DrafterInputs:
        return training_inputs(case.target, drafter, batch, case.tested.generator(5))

    generator = case.tested.generator(34)
    with torch.no_grad():
        blind = drafter(inputs())
        nothing = _reveal(case, blind, 0.0, generator)
        try:
            shown = drafter(inputs(), nothing)
        except FalconLabError:
            return  # a drafter may refuse glances by saying so
        some = _reveal(case, blind, 0.5, generator)
        half = drafter(inputs(), some)
        again = _reveal(case, blind, 0.5, generator)
        mask = some.mask
        same_rows = Reveal(
            mask,
            torch.where(mask, some.tokens, again.tokens),
            torch.where(mask[..., None], some.features, again.features),
        )
        same = drafter(inputs(), same_rows)
    fix = "take the label's token and feature in place of a row's input where reveal.mask is true"
    case.same("a glance that shows nothing", logits_of(case, shown), logits_of(case, blind), fix)
    case.same(
        "a glance, when labels that it does not show change",
        logits_of(case, same),
        logits_of(case, half),
        fix,
    )
    for name in ("label", "source", "slot", "group"):
        case.tested.expect(
            torch.equal(getattr(half, name), getattr(blind, name)),
            f"Prediction.{name} with a glance",
            expected="that of the same inputs without it",
            found="another one",
            fix="the rows of reveal are those of the first pass",
        )


def _reveal(case: Case, rows: Prediction, share: float, generator: torch.Generator) -> Reveal:
    shape = rows.label.shape
    mask = torch.rand(shape, generator=generator) < share
    tokens = torch.randint(1, case.target.vocab_size, shape, generator=generator)
    width = case.target.hidden_size
    return Reveal(mask, tokens, torch.randn(*shape, width, generator=generator))


def check_saved(case: Case) -> None:
    """Check that the drafter drafts the same when it is saved, built anew and loaded."""
    drafter = case.fresh()
    components, node = case.tested.registered()
    with TemporaryDirectory() as place:
        folder = save_drafter(
            Path(place) / "drafter",
            drafter,
            node=node,
            provenance=components.provenance("drafter", node),
            target=case.target,
            card="",
        )
        loaded = load_drafter(folder, case.target, components)
    rounds = []
    for each in (loaded, drafter):
        drafted = DraftedSequence(each, case.text(each, 12))
        drafted.observe(12)
        rounds.append(drafted.round(case.tested.generator(40)))
    for ours, expected in zip(*rounds, strict=True):
        case.same(
            "drafts of the drafter that was saved and loaded",
            ours.target_logits,
            expected.target_logits,
            "keep whatever was learnt in parameters or buffers, so that state_dict() has it",
        )


CHECKS: list[tuple[str, Any]] = [
    ("the rows of its training pass", check_prediction),
    ("that a training step is reproducible", check_reproducible),
    ("that every weight is trained and the target is not", check_gradients),
    ("the weights that a training begins with", check_first_weights),
    ("glances", check_glances),
    ("that it can be saved and loaded", check_saved),
]
