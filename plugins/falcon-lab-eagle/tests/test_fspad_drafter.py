"""What is FSPAD's alone."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_cases import HIDDEN, KNOWN, inputs, target, text
from falcon_lab_eagle import EagleConfig, FspadConfig
from falcon_lab_eagle.eagle import EagleDrafter
from falcon_lab_eagle.fspad import FspadDrafter
from transformers import LlamaConfig

from falcon_lab import testing
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.interfaces import BuildContext, Frontier, Observation

ROOT = Frontier.root(torch.device("cpu"))
OBJECTIVE = {"name": "falcon", "feature": 1.0, "soft": 0.1, "hard": 0.0}


def fspad(family: str = "llama", **options: Any) -> Any:
    node = {"name": "fspad", **options}
    return testing.build_drafter(target(family), node, components=KNOWN, seed=3, stir=0.1)


def trained(made: Any, glance: str, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a step and its gradients, in the order of the weights."""
    batch = testing.packed([[row[:8], row[8:]] for row in text(40).view(2, 20)])
    module = testing.distillation(
        made.host, made, objective=OBJECTIVE, schedule={"name": glance}, components=KNOWN, **options
    )
    made.zero_grad()
    loss, _ = module.step(batch).train(0.4 if glance != "none" else 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), [weight.grad for weight in made.parameters()]


def drafts(made: Any) -> list[torch.Tensor]:
    tokens, features = text(14), torch.randn(14, HIDDEN, generator=torch.manual_seed(1))
    made.reset(tokens[0])
    found = []
    for part in (slice(0, 9), slice(9, 10), slice(10, 14)):
        made.observe(Observation(tokens[part], features[part]))
        deeper = Frontier(torch.tensor([[1], [2]]), torch.tensor([0, 0]))
        for frontier in (ROOT, deeper, Frontier(torch.tensor([[3], [4]]), torch.tensor([1, 0]))):
            output = made.draft(frontier)
            found += [output.logits, output.features]
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("glance", ["none", "csgd"])
def test_without_both_changes_it_is_eagle_1_bit_for_bit(family: str, glance: str) -> None:
    plain, outcomes = FspadConfig(sampling=False, alignment=False), []
    for kind, config in ((EagleDrafter, EagleConfig()), (FspadDrafter, plain)):
        torch.manual_seed(5)
        made: Any = kind(config, BuildContext(target(family)))  # type: ignore[arg-type]
        weights = [weight.detach().clone() for weight in made.parameters()]
        loss, gradients = trained(made, glance, unroll=2, noise=0.1)
        outcomes.append([*weights, loss, *gradients, *drafts(made.eval())])
    assert len(outcomes[0]) == len(outcomes[1])
    assert all(torch.equal(ours, eagles) for ours, eagles in zip(*outcomes, strict=True))


@torch.no_grad()
def test_a_pass_is_that_of_the_paper() -> None:
    """Written out for one row, which attends to itself alone."""
    made = fspad()
    given = inputs(made, 1)
    token, feature = made.host.embed(given.tokens[0, 0]), given.features[0, 0]
    fuse, base = made.fuse, made.backbone.base
    fused = fuse.mix(torch.cat([token, feature]))
    gate = torch.nn.functional.silu(fuse.gate_proj(token))
    fused = fused + fuse.down_proj(gate * fuse.up_proj(fuse.norm(fused)))
    layer = base.layers[0]
    value = layer.self_attn.v_proj(layer.input_layernorm(fused))
    between = fused + layer.self_attn.o_proj(
        value.view(2, -1).repeat_interleave(2, dim=0).flatten()
    )
    inner = layer.post_attention_layernorm(between)
    inner = torch.nn.functional.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner)
    said, carried = layer.mlp.down_proj.weight.chunk(2)
    found = made(given)
    torch.testing.assert_close(found.hidden[0, 0], base.norm(between + said @ inner))
    torch.testing.assert_close(found.features[0, 0], base.norm(between + carried @ inner))
    made.reset(given.tokens[0, 0])
    made.observe(Observation(given.tokens[0], given.features[0]))
    output = made.draft(ROOT)
    torch.testing.assert_close(output.features[0, 0], found.features[0, 0])
    torch.testing.assert_close(output.logits[0, 0], made.host.head(found.hidden[0, 0]))


@torch.no_grad()
def test_equal_halves_are_eagle_1_s_feature() -> None:
    made = fspad(sampling=False, layers=2)
    eagle = testing.build_drafter(target(), {"name": "eagle", "layers": 2}, components=KNOWN)
    weights = made.state_dict()
    for name, weight in eagle.state_dict().items():
        last = name.endswith("1.mlp.down_proj.weight")
        weights[name].copy_(torch.cat([weight, weight]) if last else weight)
    given = inputs(made, 9, 6)
    ours, whole = made(given), eagle(given).features
    torch.testing.assert_close(ours.features, whole)
    torch.testing.assert_close(ours.hidden, whole)


@torch.no_grad()
def test_a_later_pass_reads_the_half_that_is_trained_to_be_a_feature() -> None:
    made, read = fspad(), list[torch.Tensor]()
    made.fuse.register_forward_hook(lambda _, args, __: read.append(args[0][..., HIDDEN:]))
    first, _ = islice(made.unroll(inputs(made, 6)), 2)
    torch.testing.assert_close(read[1].flatten(0, 1), first.features.flatten(0, 1))
    assert not torch.allclose(first.features, first.hidden)


@pytest.mark.parametrize("options", [{}, {"draft_vocabulary": 8, "layers": 2}])
def test_every_weight_learns(options: dict[str, Any]) -> None:
    made = fspad(**options)
    _, gradients = trained(made, "csgd", unroll=2)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_it_begins_at_the_least_squares_solution_with_its_branches_closed(family: str) -> None:
    made, host = fspad(family), target(family)
    whole = testing.packed([text(200)[None]])
    given = testing.training_inputs(host, made, whole, torch.Generator())
    features = host.teacher(whole.tokens, whole.documents, whole.positions)
    before = made(given).features
    solution = made.first_weights()
    solution.add(given, features)
    assert solution.assign() == 199
    found = made(given)
    assert torch.equal(found.features, found.hidden)
    errors = [(of[:, :-1] - features[:, 1:-1]).square().mean() for of in (before, found.features)]
    assert errors[1] < errors[0] / 2


def test_it_has_the_weights_of_the_paper_s_layers_for_vicuna_7b() -> None:
    vicuna = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
    host: Any = SimpleNamespace(hidden_size=4096, config=vicuna, max_positions=2048)
    wide, inner, counts = 4096, 11008, dict[tuple[bool, bool], int]()
    for options in ((False, False), (True, False), (False, True), (True, True)):
        with torch.device("meta"):
            made = FspadDrafter(FspadConfig(None, 1, *options), BuildContext(host))
        counts[options] = sum(weight.numel() for weight in made.parameters())
    fc, layer = 2 * wide * wide + wide, 4 * wide * wide + 3 * wide * inner + 3 * wide
    assert counts[False, False] == fc + layer  # 0.24 billion, EAGLE-1's
    assert counts[True, False] == counts[False, False] + 3 * wide * inner + wide
    assert counts[False, True] == counts[False, False] + wide * inner
    assert counts[True, True] == counts[True, False] + wide * inner


def test_what_is_saved_drafts_the_same(tmp_path: Path) -> None:
    made, node = fspad(draft_vocabulary=8), {"name": "fspad", "draft_vocabulary": 8}
    known = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "it", made, node=node, provenance=known, target=target(), card="")
    again = load_drafter(tmp_path / "it", target(), KNOWN)
    for ours, loaded in zip(drafts(made), drafts(again), strict=True):
        assert torch.equal(ours, loaded)
