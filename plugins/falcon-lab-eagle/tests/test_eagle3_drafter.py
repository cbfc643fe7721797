"""What is EAGLE-3's alone."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import HEADS, HIDDEN, KNOWN, TREES, drafter, engine, inputs, target, text
from falcon_lab_eagle.eagle3 import default_taps

from falcon_lab.data.packing import Batch
from falcon_lab.distill.module import Distillation
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Frontier, Observation
from falcon_lab.testing import distillation, packed, write

ROOT = Frontier.root(torch.device("cpu"))


def batch() -> Batch:
    """Return two documents in each of two sequences."""
    return packed([[row[:8], row[8:]] for row in text(40).view(2, 20)])


def module(
    made: Any, *, feature: float = 0.0, glance: str = "none", **options: Any
) -> Distillation:
    objective = {"name": "falcon", "feature": feature, "soft": 1.0, "hard": 0.1}
    parts = {"objective": objective, "schedule": {"name": glance}, "components": KNOWN}
    return distillation(made.host, made, **parts, seed=1, noise=0.0, **options)


def test_queries_keys_and_values_read_twice_the_width() -> None:
    attention = drafter("eagle3").backbone.base.attention
    shapes = [tuple(getattr(attention, f"{name}_proj").weight.shape) for name in "qkvo"]
    half = HIDDEN // 2  # two key/value heads for four query heads
    assert shapes == [(HIDDEN, 2 * HIDDEN), *[(half, 2 * HIDDEN)] * 2, (HIDDEN, HIDDEN)]


def test_a_pass_is_the_layer_of_the_paper() -> None:
    """Written out for one row, which attends to itself alone."""
    made = drafter("eagle3")
    given = inputs(made, 1)
    assert given.taps is not None
    layer: Any = made.backbone.base
    fused = made.mix(given.taps[0, 0].flatten())
    embedding = made.host.embed(given.tokens[0, 0])
    both = torch.cat([layer.embedding_norm(embedding), layer.hidden_norm(fused)])
    value = layer.attention.v_proj(both).view(2, -1).repeat_interleave(2, dim=0).flatten()
    between = fused + layer.attention.o_proj(value)
    expected = between + layer.mlp(layer.mlp_norm(between))
    found = made(given)
    assert found.features is None
    torch.testing.assert_close(found.hidden[0, 0], expected)
    logits = made.host.head(made.norm(expected))
    torch.testing.assert_close(found.head(found.hidden[0, 0], found.slot[0, 0]), logits)


def test_its_own_output_stands_where_no_layer_was_read() -> None:
    made = drafter("eagle3")
    given = inputs(made, 6)
    assert given.taps is not None
    read = []
    made.fuse.register_forward_hook(lambda _, args, __: read.append(args[0][..., HIDDEN:]))
    first, second = islice(made.unroll(given), 2)
    torch.testing.assert_close(read[0], made.read(None, given.taps))
    torch.testing.assert_close(read[1].flatten(0, 1), first.hidden.flatten(0, 1))
    assert second.label[0].tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("head", ["eagle3", "eagle3-own"])
def test_every_weight_learns_from_unrolled_passes(head: str) -> None:
    made = drafter(head)
    loss, tally = module(made, unroll=3, unroll_decay=0.8).step(batch()).train(0.0, accuracy=True)
    loss.backward()  # type: ignore[no-untyped-call]
    for name, weight in made.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name
    assert "train/pass_3/position_1/accuracy" in tally.reduced()
    assert all(weight.grad is None for weight in made.host.model.parameters())


def test_logits_come_in_chunks_however_many_there_are() -> None:
    losses = []
    for rows in (5, 1000):
        made = drafter("eagle3-own")
        trained = module(made, unroll=2)
        trained.chunk = rows
        loss, _ = trained.step(batch()).train(0.0)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append([loss.detach(), *(weight.grad for weight in made.parameters())])
    for ours, whole in zip(*losses, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def test_a_feature_loss_and_a_glance_are_refused_with_what_to_set() -> None:
    made = drafter("eagle3")
    with pytest.raises(FalconLabError, match=r"objective\.feature=0"):
        module(made, feature=1.0).step(batch()).train(0.0)
    with pytest.raises(FalconLabError, match=r"glancing\.name=none"):
        module(made, glance="csgd").step(batch()).train(0.4)


def test_a_prompt_in_parts_is_the_prompt_at_once() -> None:
    made = drafter("eagle3")
    given = inputs(made, 30)
    assert given.taps is not None
    outputs = []
    for sizes in ([30], [11, 12, 7]):
        made.reset(given.tokens[0, 0])
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            start += size
            left = 30 - start
            seen = Observation(given.tokens[0, part], None, left, given.taps[0, part])
            made.observe(seen)
        outputs.append(made.draft(ROOT).logits)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_it_is_told_of_nothing_but_its_layers() -> None:
    made, told = drafter("eagle3"), []
    inner = made.observe

    def observe(observation: Observation) -> None:
        told.append(observation)
        inner(observation)

    made.observe = observe
    one = engine(target(), made, tree=TREES["chain"])
    assert one.target.taps == made.taps == (1, 2, 3)
    write(one, text(5).tolist(), 6)
    assert all(seen.features is None and seen.taps is not None for seen in told)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(32, (2, 16, 29)), (16, (2, 8, 13)), (9, (2, 4, 6)), (4, (1, 2, 3)), (2, (0, 1)), (1, (0,))],
)
def test_layers_low_middle_and_high_are_read(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


def test_what_is_saved_drafts_the_same(tmp_path: Path) -> None:
    made, given = drafter("eagle3-own"), inputs(drafter("eagle3-own"), 7)
    node = HEADS["eagle3-own"]
    known = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "it", made, node=node, provenance=known, target=target(), card="")
    again = load_drafter(tmp_path / "it", target(), KNOWN)
    assert torch.equal(again(given).hidden, made(given).hidden)
