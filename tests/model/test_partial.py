from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import LayerPlan
from falcon_lab.model.backbone import Taps
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.partial import ATTENTIONS, NETWORKS
from falcon_lab.model.passes import NewPositions
from falcon_lab.model.target import Target
from falcon_lab.testing.compiling import traced
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
        (
            LayerPlan(groups=((2, 3, 4),)),
            "layers 2, 3, 4 cannot be a group: .* layers 0 to 3 alone",
        ),
        (LayerPlan(groups=((0, 2),)), "layers 0, 2 cannot be a group: list consecutive"),
        (LayerPlan(groups=((2, 1),)), "layers 2, 1 cannot be a group: list consecutive"),
        (LayerPlan(groups=((),)), "cannot be a group: list consecutive"),
        (
            LayerPlan(groups=((0, 1), (1, 2))),
            "layers 1, 2 cannot be a group: layer 1 is in another",
        ),
        (LayerPlan(last=2, groups=((1, 2),)), "layers 1, 2 cannot be a group: .* layers 0 to 1"),
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


# --- groups of layers -----------------------------------------------------------------------------

GROUP = (1, 2, 3)
GROUPED = LayerPlan(groups=(GROUP,))


def same_cache(ours: KVCache, theirs: KVCache) -> None:
    for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        for one, another in zip(mine, other, strict=True):
            filled = slice(0, ours.length)
            torch.testing.assert_close(one[:, :, filled], another[:, :, filled])


def test_a_group_of_one_layer_is_an_ordinary_layer(target: Target) -> None:
    ours, theirs = read(target), read(target)
    found = run(target, ours, LayerPlan(groups=((0,), (2,))))
    torch.testing.assert_close(found, run(target, theirs, LayerPlan()))
    same_cache(ours, theirs)


def read_under(target: Target, plan: LayerPlan) -> tuple[Tensor, KVCache]:
    """Features of the text, read under a plan from the start, and its keys and values."""
    cache, mask = target.new_cache(32), torch.ones(len(TEXT), len(TEXT)).tril().bool()
    new = NewPositions(torch.arange(len(TEXT)), mask, cache)
    return target.run_part(torch.tensor(TEXT), new, plan), cache


def turned(heads: Tensor, base: Any) -> Tensor:
    """Rotary embedding of ``[heads, T, D]``, as complex numbers."""
    size = heads.shape[-1]
    angles = torch.arange(len(TEXT))[:, None] * base.rotary_emb.inv_freq
    pairs = torch.complex(heads[..., : size // 2], heads[..., size // 2 :])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of ``[heads, T, D]``, as many heads each: ``[T, heads·D]``."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    future = torch.ones(len(TEXT), len(TEXT)).triu(1).bool()
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).flatten(1)


def of_llama(base: Any, layer: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    part, normed = layer.self_attn, layer.input_layernorm(given)
    projected = [one(normed) for one in (part.q_proj, part.k_proj, part.v_proj)]
    query, key, value = (one.unflatten(-1, (-1, 8)).transpose(0, 1) for one in projected)
    query, key = turned(query, base), turned(key, base)
    every = [one.repeat_interleave(2, 0) for one in (key, value)]
    return part.o_proj(attended(query, *every)), key


def of_gpt2(base: Any, layer: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    part = layer.attn
    joined = part.c_attn(layer.ln_1(given)).split(32, -1)
    query, key, value = (one.unflatten(-1, (4, 8)).transpose(0, 1) for one in joined)
    return part.c_proj(attended(query, key, value)), key


def of_gemma3(base: Any, layer: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    """By the family's own attention: the formula of groups is what is tried here."""
    kind = layer.self_attn.layer_type
    rotation = base.rotary_emb(given[None], torch.arange(len(TEXT))[None], kind)
    mask = torch.ones(len(TEXT), len(TEXT)).tril().bool()
    if kind == "sliding_attention":
        mask = mask.triu(1 - base.config.sliding_window)
    normed = layer.input_layernorm(given)[None]
    added = layer.self_attn(normed, position_embeddings=rotation, attention_mask=mask[None, None])
    return layer.post_attention_layernorm(added[0][0]), torch.empty(0)


def networks(layer: Any, hidden: Tensor) -> Tensor:
    if hasattr(layer, "ln_2"):
        return layer.mlp(layer.ln_2(hidden))
    if hasattr(layer, "pre_feedforward_layernorm"):
        found = layer.mlp(layer.pre_feedforward_layernorm(hidden))
        return layer.post_feedforward_layernorm(found)
    return layer.mlp(layer.post_attention_layernorm(hidden))


@torch.no_grad()
def direct(
    target: Target, attention: Callable[..., tuple[Tensor, Tensor]], group: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """The formula: h += a_i; h += MLP_i(LN_i(h)), where all a_i are of the group's own input."""
    base, keys = target.backbone.base, []
    layers = base.h if hasattr(base, "h") else base.layers
    hidden = base.get_input_embeddings()(torch.tensor(TEXT))
    if hasattr(base, "wpe"):
        hidden = hidden + base.wpe(torch.arange(len(TEXT)))
    given = hidden
    for number, layer in enumerate(layers):
        given = given if number in group[1:] else hidden
        added, key = attention(base, layer, given)
        hidden = hidden + added
        hidden = hidden + networks(layer, hidden)
        keys.append(key)
    return target.backbone.final_norm(hidden), keys


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", of_llama), ("llama, lean", of_llama), ("gpt2", of_gpt2), ("gemma3", of_gemma3)],
    ids=["llama", "lean", "gpt2", "gemma3"],
)
def test_a_group_is_what_its_formula_says(
    family: str, attention: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    name, _, lean = family.partition(", ")
    target = target_of(name, lean=bool(lean))
    for group in (GROUP, (0, 1)):
        found, cache = read_under(target, LayerPlan(groups=(group,)))
        expected, keys = direct(target, attention, group)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(cache.tensors()[0], keys, strict=True):
            if theirs.numel():
                torch.testing.assert_close(ours[0, :, : len(TEXT)], theirs, rtol=1e-4, atol=1e-4)
    ordinary, _ = direct(target, attention, ())
    assert (found - ordinary).abs().max() > 1e-2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(groups=((0, 1), (2, 3)), skip_mlp=frozenset({0, 3})),
        LayerPlan(groups=(GROUP,), skip_attention=frozenset({1})),
        LayerPlan(groups=(GROUP,), skip_attention=frozenset({1, 3}), skip_mlp=frozenset({1})),
    ],
)
def test_groups_skipped_parts_and_gates_go_together(plan: LayerPlan, gated: bool) -> None:
    slow, lean = (target_of("qwen3", lean=lean) for lean in (False, True))
    plan = replace(plan, gate=Alternating() if gated else None)
    torch.testing.assert_close(
        run(lean, read(lean), plan), run(slow, read(slow), plan), rtol=1e-4, atol=1e-4
    )


def test_attentions_of_a_group_may_be_computed_elsewhere_on_llama_like_layers() -> None:
    seen = []

    def beside(attentions: Sequence[Callable[[], Tensor]], hidden: Tensor) -> list[Tensor]:
        seen.append((len(attentions), hidden.shape))
        return [attention() for attention in reversed(attentions)][::-1]

    target = target_of("mistral", lean=True)
    ours, theirs = read(target), read(target)
    found = run(target, ours, replace(GROUPED, beside=beside))
    torch.testing.assert_close(found, run(target, theirs, GROUPED))
    same_cache(ours, theirs)
    assert seen == [(len(GROUP), (1, 5, 32))]
    other = target_of("gpt2", lean=True)
    with pytest.raises(FalconLabError, match="only those of Llama-like layers can"):
        run(other, read(other), replace(GROUPED, beside=beside))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_pass_of_groups_can_be_traced(family: str) -> None:
    target = target_of(family, lean=family == "llama")
    fast = target.compiled(lambda line: None, traced)
    ours, expected = (
        run_one(each, NewPositions(torch.tensor([len(TEXT)]), None, roomy(each)))
        for each in (fast, target)
    )
    torch.testing.assert_close(ours, expected)


def roomy(target: Target) -> KVCache:
    cache = target.new_cache(128)
    target.prefill(torch.tensor(TEXT), cache)
    return cache


def run_one(target: Target, new: NewPositions) -> Tensor:
    return target.run_part(torch.tensor([3]), new, GROUPED)


class Shifted(GPT2Block):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states + torch.arange(32), *args, **kwargs)


def test_a_family_whose_attention_reads_something_else_is_refused() -> None:
    target = target_of("gpt2")
    for layer in target.backbone.base.h:
        layer.__class__ = Shifted
    with pytest.raises(FalconLabError, match="reads something else than what its layer reads"):
        run(target, read(target), GROUPED)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_for_a_group_is_as_good_as_one_a_layer(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, vocab=V, layers=LAYERS, hidden=192).to(dtype)
    targets = [
        Target(copy.deepcopy(model), tiny_tokenizer(V), name=family, lean=lean)
        for lean in (True, False)
    ]
    ours, theirs = (run(each, read(each), GROUPED).float() for each in targets)
    close = 1e-4 if dtype == torch.float32 else 0.05
    assert (ours - theirs).norm() <= close * theirs.norm()
