from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import KNOWN, SPLIT, TEXT, WHOLE, drafter, engine, inputs, seen, target
from falcon_lab_dflash import DFlashConfig
from falcon_lab_dflash.anchors import draw_anchors
from falcon_lab_dflash.drafter import spread

from falcon_lab import fields
from falcon_lab.distill.rows import label_rows
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import (
    Budget,
    Frontier,
    Observation,
    Reveal,
    RoundContext,
    is_trainable,
)
from falcon_lab.model.attention.block_sparse import TILE
from falcon_lab.sampling import Sampling
from falcon_lab.testing import packed

ROOT = Frontier.root(torch.device("cpu"))
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def at(made: Any, rows: Any, row: int) -> torch.Tensor:
    """Draft logits after rows 0..row of the first sequence."""
    made.reset(rows.tokens[0, 0])
    made.observe(seen(rows, 0, 0, row + 1))
    return made.draft(ROOT).logits[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_drafts_at_every_position_as_it_is_trained(family: str) -> None:
    model = target(family)
    made = drafter(model)
    rows = inputs(model, made, *WHOLE)
    anchors = torch.tensor([[0, 1, 7, 18], [2, 3, 5, 9]])
    prediction = made.predict(rows, anchors)
    trained = model.head(prediction.features).detach()
    for number, anchor in enumerate(anchors[0].tolist()):
        mine = prediction.group[0] == number
        assert prediction.slot[0, mine].tolist() == [0, 1, 2]
        assert (prediction.source[0, mine] == anchor).all()
        torch.testing.assert_close(at(made, rows, anchor), trained[0, mine], **CLOSE)


def test_blocks_that_are_many_are_trained_as_few_are() -> None:
    """More queries than a tile of ``block_sparse_attention`` has, and as many as one has."""
    model = target()
    made = drafter(model)
    rows = inputs(model, made, *WHOLE)
    anchors = (torch.arange(24) % 19).expand(2, -1)
    assert made.block * 12 <= TILE < made.block * 24
    together = made.predict(rows, anchors).features
    parts = [made.predict(rows, some).features for some in anchors.split(12, dim=1)]
    assert together is not None
    torch.testing.assert_close(together, torch.cat(parts, dim=1), **CLOSE)  # type: ignore[arg-type]


def test_a_document_that_is_packed_is_trained_as_if_it_stood_alone() -> None:
    model = target()
    made = drafter(model)
    packed = inputs(model, made, *SPLIT)
    alone = inputs(model, made, *([row[8:]] for row in TEXT))
    both = made.predict(packed, torch.tensor([[3, 10, 15]] * 2)).features
    mine = made.predict(alone, torch.tensor([[2, 7]] * 2)).features
    torch.testing.assert_close(both[:, 3:], mine, **CLOSE)


def test_nothing_that_comes_after_the_root_is_seen() -> None:
    model = target()
    made, anchors = drafter(model), torch.tensor([[2, 6]] * 2)
    before = made.predict(inputs(model, made, *WHOLE), anchors).features[:, 3:]
    changed = TEXT.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 12  # the root of the second block is token 7
    after = made.predict(inputs(model, made, *([row] for row in changed)), anchors).features[:, 3:]
    torch.testing.assert_close(before, after)
    changed[:, 7] = (changed[:, 7] + 1) % 12
    root = made.predict(inputs(model, made, *([row] for row in changed)), anchors).features[:, 3:]
    assert not torch.allclose(before, root, atol=1e-3)


def test_cached_is_uncached_however_the_rows_come() -> None:
    model = target()
    made = drafter(model, layers=3)
    rows = inputs(model, made, *WHOLE)
    at_once = at(made, rows, 18)
    for cuts in ([1, 2, 3, 10], [5, 6], list(range(1, 19))):
        made.reset(rows.tokens[0, 0])
        if len(cuts) == 2:
            made.reserve(4, engine(model, made).tree_builder)  # it must grow
        for start, stop in zip([0, *cuts], [*cuts, 19], strict=True):
            made.observe(seen(rows, 0, start, stop))
            made.draft(ROOT)  # what a pass writes is gone afterwards
        torch.testing.assert_close(made.draft(ROOT).logits[0], at_once, **CLOSE)


def test_the_masks_see_each_other_both_ways() -> None:
    """What is revealed of a block changes its other rows, before and after, and no other block."""
    model = target()
    made, anchors = drafter(model, layers=1), torch.tensor([[2, 9]] * 2)
    rows = inputs(model, made, *WHOLE)
    hidden = made.predict(rows, anchors)
    mask = torch.zeros_like(hidden.slot, dtype=torch.bool)
    mask[:, 1] = True  # the middle row of the first block
    tokens = torch.full_like(hidden.slot, 4)
    shown = made.predict(rows, anchors, Reveal(mask, tokens, hidden.features.detach())).features
    changed = (shown - hidden.features).abs().amax(-1) > 1e-4
    assert changed.tolist() == [[True, True, True, False, False, False]] * 2


def test_mask_j_is_taught_the_token_j_below_the_root() -> None:
    model = target()
    made = drafter(model, anchors=30)
    rows = inputs(model, made, *SPLIT)
    batch, prediction = packed(SPLIT), made(rows)
    labels = label_rows(batch, prediction)
    assert len(set(prediction.group[0].tolist())) == 19
    for row in range(prediction.slot.shape[1]):
        anchor, below = int(prediction.source[0, row]), int(prediction.slot[0, row]) + 1
        about = anchor + 1 + below
        inside = about < 20 and bool(batch.documents[0, about] == batch.documents[0, anchor])
        assert bool(labels.valid[0, row]) == inside
        if inside:
            assert int(labels.tokens[0, row]) == int(TEXT[0, about])


def test_anchors_are_drawn_from_documents_that_go_on() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, -1, -1, -1]])
    times = torch.zeros(10)
    for seed in range(400):
        drawn = draw_anchors(documents, 2, torch.Generator().manual_seed(seed))[0]
        assert drawn.tolist() == sorted(set(drawn.tolist()))
        times[drawn] += 1
    possible = torch.tensor([0, 1, 3, 4])
    assert times[possible].sum() == 800
    assert (times[possible] - 200).abs().max() < 40
    assert draw_anchors(documents, 99, torch.Generator()).shape == (1, 10)


def test_the_generator_decides_the_anchors() -> None:
    model = target()
    made = drafter(model, anchors=4)
    rows = inputs(model, made, *WHOLE)
    sources = []
    for seed in (1, 1, 2):
        rows.generator.manual_seed(seed)
        sources.append(made(rows).source)
    assert torch.equal(sources[0], sources[1])
    assert not torch.equal(sources[0], sources[2])


def test_the_optimal_tree_holds_the_likeliest_paths_of_the_block() -> None:
    """DDTree takes the best prefixes under a product of one distribution a position."""
    model = target(vocab=6)
    made = drafter(model)
    builder = engine(model, made, tree={"name": "optimal", "nodes": 14}).tree_builder
    logits = at(made, inputs(model, made, *([row % 6] for row in TEXT)), 11)
    context = RoundContext(torch.tensor(0), Budget(), Sampling(), torch.Generator())
    assert builder.start(context) is not None
    assert builder.grow(made.draft(ROOT)) is None  # one pass is all
    tree = builder.finish()
    paths = set()
    for node in range(1, tree.nodes):
        way = tree.ancestors[node].nonzero().flatten()[1:]
        paths.add(tuple(tree.tokens[way].tolist()))
    log_p = logits.log_softmax(-1)
    every = [p for length in (1, 2, 3) for p in product(range(6), repeat=length)]
    every.sort(key=lambda path: -sum(float(log_p[row, t]) for row, t in enumerate(path)))
    assert paths == set(every[:14])


def test_it_is_a_trainable_drafter_that_taps_layers_and_makes_one_pass() -> None:
    made = drafter(target())
    assert is_trainable(made)
    assert (made.block, made.needs, made.max_passes, made.taps) == (3, frozenset(), 1, (1, 2))
    assert drafter(target(), taps=[0, 2]).taps == (0, 2)


def test_the_taps_are_spread_over_the_target() -> None:
    assert spread(16) == (1, 4, 8, 11, 15)
    assert spread(1) == spread(2) == (1,)
    for layers in range(2, 60):
        found = spread(layers)
        assert found == tuple(sorted(set(found)))
        assert found[0] == 1
        assert found[-1] == layers - 1
        assert len(found) == min(5, layers - 1)


def test_the_memory_that_is_announced_is_what_is_taken() -> None:
    model = target()
    made = drafter(model, layers=2)
    rows = inputs(model, made, *WHOLE)
    tree = engine(model, made).tree_builder
    made.reset(rows.tokens[0, 0])
    made.reserve(40, tree)
    made.observe(seen(rows, 0, 0, 19))
    made.draft(ROOT)
    assert made._cache is not None
    assert made._cache.nbytes == made.kv_bytes(40, tree)


def test_below_its_block_it_has_nothing_to_say() -> None:
    below = Frontier(torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long))
    assert drafter(target()).draft(below).logits.shape == (4, 0, 12)


def test_without_taps_or_a_position_it_says_what_is_missing() -> None:
    made = drafter(target())
    with pytest.raises(RuntimeError, match="observe"):
        made.draft(ROOT)
    with pytest.raises(ValueError, match="taps"):
        made.observe(Observation(torch.tensor([1]), None))


def test_a_saved_drafter_drafts_the_same(tmp_path: Path) -> None:
    model = target()
    made = drafter(model)
    node = {"name": "dflash", "block": 3}
    provenance = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "d", made, node=node, provenance=provenance, target=model, card="")
    again = load_drafter(tmp_path / "d", model, KNOWN)
    rows = inputs(model, made, *WHOLE)
    assert torch.equal(at(made, rows, 9), at(again, rows, 9))


@pytest.mark.parametrize("key", ["block", "layers", "anchors"])
def test_an_option_below_one_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"drafter.{key}"):
        fields.options(DFlashConfig, {key: 0}, "drafter")
