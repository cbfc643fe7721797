from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import LayerPlan
from falcon_lab.model.backbone import Taps
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.partial import ATTENTIONS, NETWORKS
from falcon_lab.model.passes import NewPositions
from falcon_lab.model.target import Target
from falcon_lab.testing.targets import FAMILIES, tiny_model, tiny_target, tiny_tokenizer
from falcon_lab.tree import listed_tree

LAYERS = 4
TEXT = [5, 9, 3, 11, 7, 2, 8, 6, 4]
V = 12


def target_of(family: str, *, lean: bool = False) -> Target:
    model = tiny_model(family, vocab=V, layers=LAYERS)
    return Target(model, tiny_tokenizer(V), name=family, lean=lean)


@pytest.fixture(params=[*FAMILIES, "llama, lean"])
def target(request: pytest.FixtureRequest) -> Target:
    family, _, lean = request.param.partition(", ")
    return target_of(family, lean=bool(lean))


def read(target: Target) -> KVCache:
    cache = target.new_cache(32)
    target.prefill(torch.tensor(TEXT), cache)
    return cache


def a_tree() -> tuple[Tensor, Tensor, Tensor]:
    tree = listed_tree(torch.tensor(10), [1, 2, 3, 4], [0, 1, 0, 3], [0.0] * 4)
    return tree.tokens, tree.depth, tree.ancestors


def run(target: Target, cache: KVCache, plan: LayerPlan, states: Tensor | None = None) -> Tensor:
    tokens, depth, mask = a_tree()
    new = NewPositions(depth + len(TEXT), mask, cache)
    return target.run_part(tokens if states is None else states, new, plan)


def without(target: Target, plan: LayerPlan) -> Target:
    """The same weights, whose skipped parts give zeros by hooks."""
    other = copy.deepcopy(target.model)
    layers = next(m for m in other.modules() if isinstance(m, torch.nn.ModuleList))
    for names, skipped in ((ATTENTIONS, plan.skip_attention), (NETWORKS, plan.skip_mlp)):
        for number in skipped:
            part = next(p for n in names if (p := getattr(layers[number], n, None)) is not None)
            part.register_forward_hook(lambda _module, _given, found: zeros(found))
    return Target(other, target.tokenizer, name="without")


def zeros(found: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    if isinstance(found, tuple):
        return torch.zeros_like(found[0]), *found[1:]
    return torch.zeros_like(found)


def test_skipped_parts_add_nothing_to_the_hidden_states(target: Target) -> None:
    plan = LayerPlan(skip_attention=frozenset({1, 3}), skip_mlp=frozenset({0, 3}))
    other = without(target, plan)
    # The committed text is read by the same reduced model here, so that all keys are its own.
    expected, cache = run(other, read(other), LayerPlan()), read(other)
    found = run(target, cache, plan)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (run(target, read(target), LayerPlan()) - expected).abs().max() > 1e-2


def test_a_pass_in_two_parts_equals_a_whole_one_with_its_keys_and_values(target: Target) -> None:
    whole, parted = read(target), read(target)
    expected = run(target, whole, LayerPlan())
    states = run(target, parted, LayerPlan(last=2))
    parted.truncate(len(TEXT))
    found = run(target, parted, LayerPlan(first=2), states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(parted.tensors(), whole.tensors(), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_an_early_exit_gives_the_normed_states_that_a_layer_puts_out(target: Target) -> None:
    taps = Taps([2])
    tokens, depth, mask = a_tree()
    target.backbone(
        tokens=tokens[None],
        positions=depth[None] + len(TEXT),
        mask=mask[None],
        cache=read(target),
        taps=taps,
    )
    expected = target.backbone.final_norm(taps.stacked()[0, :, 0])
    found = run(target, read(target), LayerPlan.exit_after(2, LAYERS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_states_that_a_middle_layer_reads(target: Target) -> None:
    tokens = torch.tensor([TEXT])
    positions, mask = torch.arange(len(TEXT))[None], torch.ones(9, 9).tril().bool()[None]
    documents = torch.zeros_like(tokens)
    features, taps = target.tapped([2]).tapped_teacher(tokens, documents, positions)
    states = taps[:, :, 0].clone().requires_grad_()
    found = target.run_upper(2, states, positions, mask)
    torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-4)
    (found[0, 4] * torch.arange(32)).sum().backward()
    assert states.grad is not None
    reached = states.grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [True] * 5 + [False] * 4


def test_a_copy_of_a_target_has_partial_models_of_its_own_weights() -> None:
    target = target_of("llama")
    plan = LayerPlan(first=2)
    states = torch.randn(5, 32)
    before = run(target, read(target), plan, states)
    other = copy.deepcopy(target)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.zero_()
    assert torch.equal(run(target, read(target), plan, states), before)
    assert not torch.equal(run(other, read(other), plan, states), before)


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (LayerPlan(first=4), "layers 4 to 3"),
        (LayerPlan(first=2, last=2), "layers 2 to 1"),
        (LayerPlan(last=5), "layers 0 to 4"),
        (LayerPlan(skip_attention=frozenset({4})), "attention of layer 4"),
        (LayerPlan(skip_mlp=frozenset({-1})), "mlp of layer -1"),
    ],
)
def test_layers_that_are_not_there_are_refused(plan: LayerPlan, what: str) -> None:
    target = tiny_target(vocab=V, layers=LAYERS)
    with pytest.raises(FalconLabError, match=what):
        run(target, read(target), plan)


class Alternating:
    """Lets the tokens at even positions through the networks of odd layers; keeps what it sees."""

    def __init__(self) -> None:
        self.saw: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, positions: Tensor) -> None:
        self.even = positions % 2 == 0
        self.saw.clear()

    def wanted(self, layer: int) -> Tensor | None:
        return self.even if layer % 2 else None

    def seen(self, layer: int, before: Tensor, after: Tensor) -> None:
        self.saw[layer] = before, after


def test_a_gate_decides_token_by_token(target: Target) -> None:
    gate, cache = Alternating(), read(target)
    found = run(target, cache, LayerPlan(gate=gate))
    even = ((a_tree()[1] + len(TEXT)) % 2 == 0).tolist()
    assert any(even)
    assert not all(even)
    assert sorted(gate.saw) == list(range(LAYERS))
    for layer, (before, after) in gate.saw.items():
        changed = (after - before).abs().amax(-1) > 1e-6
        assert changed.tolist() == (even if layer % 2 else [True] * len(even))
    # The root attends to the text alone, which all went through: a pass of its own says the same.
    root, _, _ = a_tree()
    odd = frozenset() if even[0] else frozenset(range(1, LAYERS, 2))
    where = NewPositions(torch.tensor([len(TEXT)]), None, read(target))
    expected = target.run_part(root[:1], where, LayerPlan(skip_mlp=odd))
    torch.testing.assert_close(found[:1], expected, rtol=1e-4, atol=1e-4)
