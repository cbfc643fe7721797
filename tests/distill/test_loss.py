"""The loss in chunks against the loss over all rows at once, and the target's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distilling import QUIET, Data, Notes, batch, distillation, weights
from falcon_lab.distill.loss import FLOAT32, MIB, ChunkedLoss, Teacher, rows_per_chunk
from falcon_lab.distill.rows import StudentRows, labelled_positions
from falcon_lab.interfaces import BuildContext, DraftVocabulary, LabelledRows, Objective
from falcon_lab.model.target import Target
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import FalconObjectiveConfig
from falcon_lab.training import train
from tiny_models import tiny_target

ROWS = 23
ALL = 1000


@cache
def _target() -> Target:
    return tiny_target()


def _rows(seed: int, *, logits: bool = False) -> StudentRows:
    """Rows about the positions of ``batch(3)``, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS, 32, generator=generator, requires_grad=True)
    own = torch.randn(ROWS, 64, generator=generator, requires_grad=True) if logits else None
    places = torch.randint(0, 48, (ROWS,), generator=generator).sort().values
    tokens = torch.randint(0, 64, (ROWS,), generator=generator)
    tokens[::5] = -100
    return StudentRows(features, own, places, tokens, places % 2, (places, places))


def _teacher(size: int) -> Teacher:
    one = batch(3)
    features = _target().teacher(one.tokens, one.documents, one.positions)
    return Teacher(_target(), one, features, size)


def _falcon(**options: Any) -> FalconObjective:
    return FalconObjective(FalconObjectiveConfig(**options), BuildContext(_target()))


class Outcome:
    """Loss and gradients in parts of ``size`` rows, and what was looked at on the way."""

    def __init__(
        self, objective: Objective, size: int, rows: StudentRows, *, glanced: bool = False
    ) -> None:
        self.terms: list[dict[str, Tensor]] = []
        self.seen: list[LabelledRows] = []
        teacher = _teacher(size)
        if glanced:
            teacher.argmax()
        generator = torch.Generator().manual_seed(1)
        loss = ChunkedLoss(objective, teacher, generator, self._look)(rows)
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        self.loss = loss.detach()
        self.gradients = [x.grad for x in (rows.features, rows.logits) if x is not None]

    def _look(self, rows: LabelledRows, terms: dict[str, Tensor]) -> None:
        self.seen.append(rows)
        self.terms.append(terms)

    def equals(self, other: Outcome) -> bool:
        pairs = zip(self.gradients, other.gradients, strict=True)
        return torch.allclose(self.loss, other.loss, rtol=1e-5) and all(
            (a is None and b is None) or torch.allclose(a, b, rtol=1e-4, atol=1e-6)
            for a, b in pairs
        )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 9),
    size=st.integers(1, ROWS),
    label=st.sampled_from(["argmax", "data", "sampled"]),
    form=st.sampled_from(["kl", "tempered"]),
    logits=st.booleans(),
    glanced=st.booleans(),
)
def test_parts_give_the_loss_and_the_gradient_of_the_whole(
    seed: int, size: int, label: str, form: str, logits: bool, glanced: bool
) -> None:
    objective = _falcon(hard_label=label, soft_form=form, soft=0.5, hard=0.7)
    whole = Outcome(objective, ALL, _rows(seed, logits=logits))
    parts = Outcome(objective, size, _rows(seed, logits=logits), glanced=glanced)
    assert len(whole.seen) == 1
    assert len(parts.seen) == -(-ROWS // size)
    assert parts.equals(whole)
    for name in objective.weights:
        together = torch.cat([terms[name] for terms in parts.terms])
        assert torch.allclose(together, whole.terms[0][name], rtol=1e-4, atol=1e-6)


class Stranger(Objective):
    """An objective of a third party that knows nothing of parts."""

    weights: Mapping[str, float] = {"distance": 0.3, "entropy": 2.0, "constant": 1.0}

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        assert rows.student_features is not None
        q = rows.student_logits.softmax(-1)
        return {
            "distance": (rows.student_features - rows.teacher_features).norm(dim=-1),
            "entropy": -(q * q.log()).sum(-1),
            "constant": rows.teacher_logits.amax(-1),
        }


@pytest.mark.parametrize("size", [1, 6, 22, 23])
def test_an_objective_that_knows_nothing_of_parts_is_served_alike(size: int) -> None:
    assert Outcome(Stranger(), size, _rows(4)).equals(Outcome(Stranger(), ALL, _rows(4)))


class Weighted(Stranger):
    """An objective with weights of its own, on the way to the logits and past them."""

    def __init__(self) -> None:
        self.layer = nn.Linear(32, 3)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.fill_(0.1)

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        assert rows.student_features is not None
        noise = torch.rand(len(rows.tokens), 1, generator=rows.generator)
        shown = self.layer(rows.student_features) * noise
        return super().__call__(rows) | {"constant": shown.square().sum(-1)}


@pytest.mark.parametrize("size", [1, 6, 22])
def test_weights_that_are_reached_past_the_rows_get_their_gradient(size: int) -> None:
    whole, parts = Weighted(), Weighted()
    expected = Outcome(whole, ALL, _rows(4))
    found = Outcome(parts, size, _rows(4))
    assert found.equals(expected)
    assert len(found.seen) == -(-ROWS // size), "what is computed again is not shown again"
    for a, b in zip(parts.layer.parameters(), whole.layer.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("size", [1, 6, 22, ALL])
def test_a_drafters_own_head_is_asked_part_by_part_too(size: int, trained: bool) -> None:
    objective, shapes = _falcon(feature=0, soft=0.5, hard=0.7), []
    own = nn.Linear(32, 64).requires_grad_(trained)

    def head(rows: Tensor, slot: Tensor) -> Tensor:
        assert rows.shape[:1] == slot.shape
        shapes.append(len(rows))
        return own(rows)

    given = _rows(4)
    rows = replace(given, features=None, hidden=given.features, head=head)
    loss = ChunkedLoss(objective, _teacher(size), torch.Generator(), lambda *_: None)(rows)
    loss.backward()  # type: ignore[no-untyped-call]
    assert max(shapes) == min(size, ROWS)
    found = given.features.grad if given.features is not None else None

    with torch.no_grad():
        leaf = given.features.detach() if given.features is not None else None
    assert leaf is not None
    leaf.requires_grad_()
    weights = [p.grad.clone() for p in own.parameters() if p.grad is not None]
    own.zero_grad()
    alone = replace(given, features=None, logits=own(leaf))
    ChunkedLoss(objective, _teacher(ALL), torch.Generator(), lambda *_: None)(alone).backward()  # type: ignore[no-untyped-call]
    assert found is not None
    assert leaf.grad is not None
    assert torch.allclose(found, leaf.grad, rtol=1e-4, atol=1e-6)
    expected = [p.grad for p in own.parameters() if p.grad is not None]
    assert len(weights) == len(expected) == 2 * trained
    for a, b in zip(weights, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_objective_without_a_gradient_gives_none() -> None:
    class Constant(Stranger):
        weights: Mapping[str, float] = {"constant": 1.0}

    rows = _rows(4)
    value = Outcome(Constant(), 6, rows)
    assert rows.features is not None
    assert rows.features.grad is not None
    assert not rows.features.grad.any()
    assert value.loss > 0


def test_no_rows_are_one_part_of_none() -> None:
    rows = next(_rows(4).chunks(ALL))
    nothing = replace(
        rows, features=torch.empty(0, 32, requires_grad=True), positions=rows.positions[:0],
        tokens=rows.tokens[:0],
    )  # fmt: skip
    found = Outcome(_falcon(), 6, nothing)
    assert found.loss == 0
    assert [{n: t.shape for n, t in terms.items()} for terms in found.terms] == [
        {"feature": (0,), "soft": (0,), "hard": (0,)}
    ]


def test_no_logits_of_all_rows_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    head = _target().head

    def watched(features: Tensor) -> Tensor:
        sizes.append(len(features))
        return head(features)

    monkeypatch.setattr(_target(), "head", watched)
    Outcome(_falcon(), 6, _rows(4))
    assert max(sizes) == 6


# --- the whole step -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 30])
@pytest.mark.parametrize(
    "options",
    [
        {"block": 2, "repeats": 2},
        {"block": 3, "query": "newest"},
        {"block": 1, "fuse": "linear", "hard_label": "sampled"},
    ],
)
def test_a_training_in_parts_is_a_training_in_one(
    tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    options = dict(options)
    objective = _falcon(soft=1.0, hard=0.5, hard_label=options.pop("hard_label", "argmax"))
    logs = []
    modules = [distillation(objective=objective, **options) for _ in range(2)]
    for module, rows in zip(modules, (ALL, size), strict=True):
        module.chunk = rows
        notes = Notes()
        trainer = {**QUIET, "max_steps": 2, "val_check_interval": 2}
        train(module, Data([3, 4], [9]), trainer, tmp_path / str(rows), notes, 0)
        logs.append(notes)
    for name, tensor in weights(modules[0]).items():
        assert torch.allclose(tensor, weights(modules[1])[name], atol=1e-4), name
    for key in ("train/loss", "train/revealed", "train/position_1/accuracy", "val/loss",
                "val/accept_rate", "val/expected_accept_length"):  # fmt: skip
        assert logs[0].series(key) == pytest.approx(logs[1].series(key), rel=1e-4), key


def test_parts_in_half_precision_learn_what_the_whole_does(tmp_path: Path) -> None:
    losses = []
    for rows in (ALL, 7):
        module = distillation()
        module.chunk = rows
        notes = Notes()
        trainer = {**QUIET, "max_steps": 3, "precision": "bf16-mixed"}
        train(module, Data([3, 4, 5]), trainer, tmp_path / str(rows), notes, 0)
        losses.append(notes.series("train/loss"))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0][0] != losses[0][2]


@settings(max_examples=10)
@given(seed=st.integers(0, 9), size=st.integers(1, ROWS))
def test_heads_of_a_drafter_s_own_learn_the_same_in_parts(seed: int, size: int) -> None:
    """Two heads, one for each slot: their weights' gradients too."""
    outcomes, learnt = [], []
    for chunk in (ALL, size):
        torch.manual_seed(0)
        heads = torch.randn(2, 64, 32, requires_grad=True)

        def own(features: Tensor, slot: Tensor, heads: Tensor = heads) -> Tensor:
            return torch.einsum("nvh,nh->nv", heads[slot], features)

        rows = replace(_rows(seed), head=own)
        outcomes.append(Outcome(_falcon(feature=0), chunk, rows))
        learnt.append(heads.grad)
    assert outcomes[1].equals(outcomes[0])
    assert learnt[0] is not None
    assert learnt[1] is not None
    assert torch.allclose(learnt[0], learnt[1], rtol=1e-4, atol=1e-6)
    assert learnt[0].abs().amax(dim=(1, 2)).gt(0).all()


# --- the target's logits ------------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "mebibytes"), [(512, 1), (128_000, 256), (10**9, 1)])
def test_two_logits_of_so_many_rows_fill_the_room(vocabulary: int, mebibytes: int) -> None:
    rows = rows_per_chunk(vocabulary, mebibytes)
    taken = 2 * FLOAT32 * vocabulary
    assert rows >= 1
    assert rows == 1 or rows * taken <= mebibytes * MIB < (rows + 1) * taken


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_target_s_choices_and_logits_do_not_depend_on_the_room(size: int) -> None:
    target, given = tiny_target(), batch(3)
    features = target.teacher(given.tokens, given.documents, given.positions)
    sizes: list[int] = []
    head = target.head

    def watched(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return head(rows)

    target.head = watched  # type: ignore[method-assign]
    teacher = Teacher(target, given, features, size)
    expected = head(features).flatten(0, 1)
    labelled = (given.documents[:, 1:] == given.documents[:, :-1]).flatten()
    places = torch.arange(48).view(2, 24)[:, :-1].flatten()[labelled]
    assert torch.equal(teacher.argmax()[places], expected[places].argmax(-1))
    assert max(sizes) <= size
    before = len(sizes)
    wanted = places[3:7].repeat_interleave(2)
    assert torch.allclose(teacher.logits(wanted), expected[wanted], atol=1e-5)
    assert sizes[before:] == ([] if size == 1000 else [4]), "equal places are computed once"


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("fit", [True, False])
def test_the_target_s_logits_are_kept_where_there_is_room_for_them(
    dtype: torch.dtype, share: float, fit: bool
) -> None:
    target, given = tiny_target(), batch(3)
    target.model.to(dtype)
    places = labelled_positions(given).flatten().nonzero()[:, 0]
    features = target.teacher(given.tokens, given.documents, given.positions)
    teacher = Teacher(target, given, features, int(share * len(places)) - (not fit))
    teacher.argmax()
    expected = target.head(features.flatten(0, 1)[places[5:9]])
    target.head = None  # type: ignore[method-assign, assignment]
    if fit:
        torch.testing.assert_close(teacher.logits(places[5:9]), expected)
    else:
        with pytest.raises(TypeError):
            teacher.logits(places[5:9])


@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("fit", [True, False])
def test_several_passes_are_compared_with_logits_that_are_computed_once(
    fit: bool, some: bool
) -> None:
    target, given = tiny_target(), batch(3)
    places = labelled_positions(given).flatten().nonzero()[:, 0]
    features = target.teacher(given.tokens, given.documents, given.positions)
    words = DraftVocabulary(target, 32, torch.arange(0, 64, 3)) if some else None
    sizes: list[int] = []
    teacher = Teacher(target, given, features, len(places) - (not fit), None, words, again=True)
    of = words or target
    head = of.head

    def watched(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return head(rows)

    of.head = watched  # type: ignore[method-assign, assignment]
    expected = head(features.flatten(0, 1))
    for wanted in (places[2:9], places[5:].repeat_interleave(2), places[:4]):
        torch.testing.assert_close(teacher.logits(wanted), expected[wanted])
    assert sizes == ([len(places)] if fit else [7, len(places) - 5, 4])


@pytest.mark.parametrize(("fit", "some"), [(False, False), (True, True), (False, True)])
def test_tokens_from_a_store_spare_the_whole_head(fit: bool, some: bool) -> None:
    target, given = tiny_target(), batch(3)
    features = target.teacher(given.tokens, given.documents, given.positions)
    given = given._replace(argmax=target.head(features).argmax(-1) + 1)
    words = DraftVocabulary(target, 32, torch.arange(64)) if some else None
    teacher = Teacher(target, given, features, 100 if fit else 5, vocabulary=words)
    expected = given.argmax
    target.head = None  # type: ignore[method-assign, assignment]
    assert expected is not None
    assert torch.equal(teacher.argmax(), expected.flatten())


class Streak(Objective):
    """A term that depends on the rows of a block before it."""

    weights: Mapping[str, float] = {"streak": 1.0}
    whole_groups = True

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        assert rows.group is not None
        chance = rows.student_logits.softmax(-1).amax(-1)
        starts = rows.group[:, None] == rows.group
        before = starts & (rows.slot[None] <= rows.slot[:, None])
        return {"streak": -(before * chance.log()).sum(-1).exp()}


@pytest.mark.parametrize("size", [1, 6, 12])
def test_blocks_are_never_cut_and_weights_count(size: int) -> None:
    rows = _rows(4)
    group = torch.arange(ROWS) // 4
    weight = torch.rand(ROWS, generator=torch.Generator().manual_seed(2))
    grouped = replace(rows, group=group, slot=torch.arange(ROWS) % 4, weight=weight)
    whole = Outcome(Streak(), ALL, grouped)
    assert len(whole.seen) == 1
    assert torch.allclose(whole.loss, (whole.terms[0]["streak"] * weight).sum())
    again = replace(grouped, features=_rows(4).features)
    assert Outcome(Streak(), size, again).equals(whole)
