import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_cases import HIDDEN, drafter, inputs, rows
from falcon_lab import fields
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TrainableDrafter,
)
from falcon_lab.plugins.builtins import FalconConfig
from tiny_models import FAMILIES, tiny_target

BLOCKS = [1, 2, 3, 4]
SWITCHES = [
    {"fuse": fuse, "query": query, "phase": phase}
    for fuse in ("lstm", "lstm_positionwise", "linear")
    for query in ("block", "newest", "mapped")
    for phase in ("aligned", "absolute")
]


def _phase(of: DrafterInputs, *phases: int) -> Tensor:
    """One phase a document."""
    return torch.tensor(phases)[of.documents]


def _some_reveal(of: DrafterInputs, prediction: Prediction) -> Reveal:
    generator = torch.Generator().manual_seed(9)
    shape = prediction.label.shape
    mask = prediction.slot < torch.randint(1, 3, shape, generator=generator)
    tokens = torch.randint(0, 64, shape, generator=generator)
    features = torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64)
    last = int(prediction.slot.max())
    return Reveal(mask & (prediction.slot < last), tokens, features)


def test_it_fulfils_what_a_trainable_drafter_promises() -> None:
    made = drafter(block=2)
    assert isinstance(made, TrainableDrafter)
    assert (made.block, made.needs) == (2, {"features"})


def test_training_through_flex_attention_on_a_cpu_is_refused_with_what_to_set() -> None:
    target = tiny_target(attention="flex_attention")
    given = inputs(9)
    with torch.compiler.set_stance("force_eager"):  # of the kernel nothing is wanted
        made = FalconDrafter(FalconConfig(), BuildContext(target))
        with pytest.raises(FalconLabError, match=r"target\.attention=sdpa"):
            made(given)


def test_the_target_is_none_of_its_weights() -> None:
    made = drafter(block=2)
    frozen = {id(p) for p in made.host.model.parameters()}
    assert frozen.isdisjoint(id(p) for p in made.parameters())
    assert not any("embed" in name or "head" in name for name in made.state_dict())


@pytest.mark.parametrize("block", BLOCKS)
def test_every_row_predicts_k_rows_ahead_from_the_newest_row_of_its_block(block: int) -> None:
    given = inputs(9)
    made = drafter(block=block).predict(given, _phase(given, 1 % block))
    column = torch.arange(9)
    assert torch.equal(made.label[0], column + block)
    assert torch.equal(made.slot[0], (column + 1) % block)
    assert torch.equal(made.source[0], column + block - 1 - made.slot[0])
    assert torch.equal(made.label[0], made.source[0] + 1 + made.slot[0])
    for group in made.group[0].unique():
        assert made.source[0, made.group[0] == group].unique().numel() == 1


@pytest.mark.parametrize("block", BLOCKS)
def test_newest_queries_predict_1_to_k_rows_beyond_their_anchor(block: int) -> None:
    given = inputs(9, 4)
    made = drafter(block=block, query="newest").predict(given, _phase(given, 0, 0))
    real = made.label[0] >= 0
    anchors = [t for t in range(9) if t % block == block - 1]
    anchors += [9 + t for t in range(4) if t % block == block - 1]
    assert made.source[0, real].tolist() == [a for a in anchors for _ in range(block)]
    assert made.label[0, real].tolist() == [a + 1 + j for a in anchors for j in range(block)]
    assert made.slot[0, real].tolist() == list(range(block)) * len(anchors)


@pytest.mark.parametrize("query", ["block", "newest", "mapped"])
def test_training_covers_every_phase_and_follows_the_generator(query: str) -> None:
    made = drafter(block=3, query=query)
    seen = set()
    for seed in range(12):
        first, again = (made(inputs(12, 12, generator=seed)) for _ in range(2))
        assert torch.equal(first.label, again.label)
        assert torch.equal(first.features, again.features)
        seen.add(tuple(first.source[0].tolist()))
    assert len(seen) > 3
    absolute = drafter(block=3, query=query, phase="absolute")
    sources = {tuple(absolute(inputs(12, generator=s)).source[0].tolist()) for s in range(5)}
    assert len(sources) == 1


# --- who sees what --------------------------------------------------------------------------------


def _leaf_rows(made: FalconDrafter, given: DrafterInputs) -> tuple[DrafterInputs, list[Tensor]]:
    """The same inputs, with embeddings and features that record a gradient."""
    embeddings = made.host.embed(given.tokens).detach().clone().requires_grad_()
    features = given.features.clone().requires_grad_()
    made.host = SimpleNamespace(embed=lambda tokens: embeddings, max_positions=256)
    leaves = DrafterInputs(
        given.tokens, features, given.documents, given.positions, given.generator
    )
    return leaves, [embeddings, features]


def _influence(output: Tensor, leaf: Tensor) -> Tensor:
    """[R, T]: how much each output row depends on each input row."""
    table = []
    for row in range(output.shape[1]):
        (gradient,) = torch.autograd.grad(output[0, row].pow(2).sum(), leaf, retain_graph=True)
        table.append(gradient[0].abs().sum(-1))
    return torch.stack(table)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_row_depends_on_its_document_up_to_the_end_of_its_block_alone(
    block: int, layers: int
) -> None:
    made = drafter(block=block, layers=layers)
    given, leaves = _leaf_rows(made, inputs(7, 6))
    prediction = made.predict(given, _phase(given, 1 % block, 0))
    document, group = given.documents[0], prediction.group[0]
    seen = (document[:, None] == document) & (group <= group[:, None])
    assert bool(seen.triu(1).any()) is (block > 1)  # it does see later rows of its block
    for leaf in leaves:
        assert torch.equal(_influence(prediction.features, leaf) > 0, seen)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_query_depends_on_its_document_up_to_its_anchor_alone(block: int) -> None:
    made = drafter(block=block, layers=2, query="newest")
    given, leaves = _leaf_rows(made, inputs(7, 6))
    prediction = made.predict(given, _phase(given, 1 % block, 0))
    real = prediction.label[0] >= 0
    document, anchor = given.documents[0], prediction.source[0]
    seen = (document[anchor][:, None] == document) & (torch.arange(13) <= anchor[:, None])
    for leaf in leaves:
        assert torch.equal((_influence(prediction.features, leaf) > 0)[real], seen[real])


@pytest.mark.parametrize("query", ["block", "newest", "mapped"])
def test_what_is_revealed_reaches_its_own_block_and_never_an_earlier_one(query: str) -> None:
    made = drafter(block=3, query=query, fuse="linear", layers=1)
    given = inputs(9)
    prediction = made.predict(given, _phase(given, 0))
    reveal = _some_reveal(given, prediction)
    shown = reveal.features.clone().requires_grad_()
    revealed = made.predict(given, _phase(given, 0), Reveal(reveal.mask, reveal.tokens, shown))
    influence = _influence(revealed.features, shown) > 0
    group = prediction.group[0]
    if query == "block":
        expected = (group <= group[:, None]) & reveal.mask[0]
    else:  # nobody outside an anchor sees its queries, shown or not
        expected = (group == group[:, None]) & reveal.mask[0]
    assert torch.equal(influence, expected)
    assert not torch.equal(revealed.features, prediction.features)
    assert torch.equal(revealed.label, prediction.label)


def test_a_revealed_row_is_replaced_by_its_label_before_it_is_fused() -> None:
    made = drafter(block=2)
    given = inputs(8)
    prediction = made.predict(given, _phase(given, 0))
    reveal = _some_reveal(given, prediction)
    tokens = torch.where(reveal.mask, reveal.tokens, given.tokens)
    features = torch.where(reveal.mask[..., None], reveal.features, given.features)
    replaced = DrafterInputs(tokens, features, given.documents, given.positions, given.generator)
    expected = made.predict(replaced, _phase(given, 0)).features
    assert torch.equal(made.predict(given, _phase(given, 0), reveal).features, expected)


def test_a_shown_query_is_the_row_that_stands_there_in_truth() -> None:
    made = drafter(block=2, query="newest", fuse="linear", layers=2)
    given = inputs(8)
    prediction = made.predict(given, _phase(given, 0))
    ahead = prediction.label.clamp(max=7)
    reveal = Reveal(
        prediction.slot == 0,
        given.tokens.gather(1, ahead),
        given.features.gather(1, ahead[..., None].expand(-1, -1, HIDDEN)),
    )
    shown = made.predict(given, _phase(given, 0), reveal).features[0, 2:4]  # of the anchor 3
    fused = made.fuse(made.join(given.tokens[:, :5], given.features[:, :5]))[0]
    assert made.offsets is not None
    mask = torch.ones(1, 6, 6).tril().bool()
    mask[:, 4:] = True
    expected = made.backbone(
        embeddings=torch.cat([fused, fused[:, 3:4] + made.offsets[1]], dim=1),
        positions=torch.tensor([[0, 1, 2, 3, 4, 3]]),
        mask=mask,
    )[0, 4:]
    assert torch.allclose(shown, expected, atol=1e-6)


# --- the same numbers whichever way they are computed ---------------------------------------------


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(s.values()))
def test_packed_documents_are_as_if_alone(switches: dict[str, Any]) -> None:
    made = drafter(block=3, layers=2, **switches)
    packed = inputs(7, 5, 9)
    whole = made.predict(packed, _phase(packed, 2, 0, 1))
    start, outputs = 0, []
    for length, phase in ((7, 2), (5, 0), (9, 1)):
        part = slice(start, start + length)
        alone = DrafterInputs(
            packed.tokens[:, part],
            packed.features[:, part],
            packed.documents[:, part],
            packed.positions[:, part],
            packed.generator,
        )
        single = made.predict(alone, torch.full((1, length), phase))
        outputs.append(single.features[single.label >= 0])
        start += length
    expected = torch.cat(outputs)
    assert torch.allclose(whole.features[whole.label >= 0], expected, atol=1e-6)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(s.values()))
def test_a_batch_is_its_sequences_one_by_one(switches: dict[str, Any]) -> None:
    made = drafter(block=2, layers=2, **switches)
    sequences = [inputs(6, 5, seed=0), inputs(3, 8, seed=1), inputs(11, seed=2)]
    fields = ("tokens", "features", "documents", "positions")
    batch = {name: torch.cat([getattr(s, name) for s in sequences]) for name in fields}
    phases = [_phase(s, 1, 0) for s in sequences]
    whole = made.predict(DrafterInputs(**batch, generator=torch.Generator()), torch.cat(phases))
    for index, (given, phase) in enumerate(zip(sequences, phases, strict=True)):
        alone = made.predict(given, phase)
        real = alone.label[0] >= 0
        together = whole.features[index][whole.label[index] >= 0]
        assert torch.allclose(together, alone.features[0, real], atol=1e-6)


def _draft(made: FalconDrafter, tokens: Tensor, features: Tensor) -> Tensor:
    made.reset(tokens[0])
    made.observe(Observation(tokens, features))
    output = made.draft(Frontier.root(tokens.device))
    assert output.features is not None
    return output.features[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_blocks_train_and_draft_alike(family: str) -> None:
    made = drafter(family=family, block=2, layers=2)
    given = inputs(11)
    trained = made.predict(given, _phase(given, 1)).features[0, -2:]
    drafted = _draft(made, given.tokens[0], given.features[0])
    assert torch.allclose(drafted, trained, atol=1e-6)


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(s.values()))
@pytest.mark.parametrize("block", BLOCKS)
def test_drafting_computes_what_training_computes(block: int, switches: dict[str, Any]) -> None:
    made = drafter(block=block, layers=2, **switches)
    for length in range(block, 2 * block + 2):
        given = inputs(length)
        aligned = switches["phase"] == "aligned" or switches["query"] != "block"
        trained = made.predict(given, _phase(given, -length % block if aligned else 0))
        drafted = _draft(made, given.tokens[0], given.features[0])
        newest = trained.features[0][trained.label[0] >= 0][-block:]
        assert torch.allclose(drafted, newest, atol=1e-6), length


@pytest.mark.parametrize("block", BLOCKS)
def test_with_one_layer_drafting_in_rounds_computes_what_training_computes(block: int) -> None:
    made = drafter(block=block, layers=1)
    tokens, features = rows(14)
    made.reset(tokens[0])
    done = 0
    for new in (5, 1, 2, 1, 4, 1):
        made.observe(Observation(tokens[done : done + new], features[done : done + new]))
        done += new
        drafted = made.draft(Frontier.root(tokens.device)).features
        given = inputs(14)
        given = DrafterInputs(
            given.tokens[:, :done],
            given.features[:, :done],
            given.documents[:, :done],
            given.positions[:, :done],
            given.generator,
        )
        trained = made.predict(given, _phase(given, -done % block))
        assert drafted is not None
        assert torch.allclose(drafted[0], trained.features[0, -block:], atol=1e-6)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "switches"),
    list(itertools.product(BLOCKS, SWITCHES)),
    ids=lambda v: v if isinstance(v, int) else "-".join(v.values()),
)
def test_every_weight_of_every_variant_gets_a_finite_gradient(
    block: int, switches: dict[str, Any]
) -> None:
    made = drafter(block=block, **switches).train()
    given = inputs(8, 9)
    first = made(given)
    given = inputs(8, 9)
    prediction = made(given, _some_reveal(given, first))
    prediction.features.pow(2).mean().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        unused = switches["fuse"] == "lstm_positionwise" and "weight_hh" in name  # from h = 0
        assert bool(parameter.grad.abs().sum() > 0) is not unused, name


def test_documents_shorter_than_a_block_have_no_query_and_break_nothing() -> None:
    made = drafter(block=4, query="newest")
    prediction = made.predict(inputs(2, 3), torch.zeros(1, 5, dtype=torch.long))
    assert (prediction.label == -1).all()
    assert prediction.features is not None
    prediction.features.sum().backward()


@pytest.mark.parametrize(
    ("option", "value"), [("fuse", "gru"), ("query", "oldest"), ("phase", "full"), ("block", 0)]
)
def test_an_unknown_switch_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"drafter.{option}"):
        fields.options(FalconConfig, {option: value}, "drafter")
