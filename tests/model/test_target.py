"""Every family reads prompts, steps, trees and packed documents as its own plain forward does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterHost
from falcon_lab.model.target import Target, end_tokens
from falcon_lab.tree import TokenTree, ancestor_matrix
from tiny_models import FAMILIES, POSITIONS, WINDOW, tiny_model, tiny_target, tiny_tokenizer

ATOL = 2e-5  # logits reach about 5, in float32
PREFIX = 2 * WINDOW

every_target = pytest.mark.parametrize(
    ("family", "attention"), [(f, a) for f in FAMILIES for a in ("sdpa", "eager")]
)


@cache
def target_of(family: str, attention: str = "sdpa") -> Target:
    return tiny_target(family, attention=attention)


def text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 64, (count,), generator=torch.Generator().manual_seed(seed))


def plain(target: Target, tokens: Tensor) -> Tensor:
    """The model's own logits, ``[T, V]``: no cache, no mask of ours."""
    with torch.no_grad():
        return target.model(input_ids=tokens[None], use_cache=False).logits[0]


def tree_of(parents: list[int], seed: int = 0) -> TokenTree:
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depth[node] = depth[parent] + 1
    above = torch.tensor(parents)
    return TokenTree(
        tokens=text(len(parents), seed),
        parents=above,
        depth=torch.tensor(depth),
        ancestors=ancestor_matrix(above),
        proposal="deterministic",
        log_q=torch.zeros(len(parents)),
    )


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    nodes = draw(st.integers(1, 9))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    return tree_of(parents, seed=draw(st.integers(0, 99)))


def path_to(tree: TokenTree, node: int) -> Tensor:
    return tree.ancestors[node].nonzero()[:, 0]


def same(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=ATOL, rtol=0)


@every_target
@settings(max_examples=20)
@given(tree=trees(), data=st.data())
def test_a_tree_is_verified_and_committed_as_its_paths_are_read_plainly(
    family: str, attention: str, tree: TokenTree, data: st.DataObject
) -> None:
    target = target_of(family, attention)
    prefix = text(PREFIX, seed=1)
    kv = target.new_cache(PREFIX + tree.nodes + 1)
    target.prefill(prefix, kv)
    verified = target.verify(tree, kv)
    for node in range(tree.nodes):
        path = tree.tokens[path_to(tree, node)]
        same(verified.logits[node], plain(target, torch.cat([prefix, path]))[-1])

    path = path_to(tree, data.draw(st.integers(0, tree.nodes - 1)))
    kv.commit([PREFIX], [path.tolist()])
    following = text(1, seed=2)
    kept = torch.cat([prefix, tree.tokens[path], following])
    same(target.step(following[0], kv).logits[0], plain(target, kept)[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_after_one_another_stay_exact_past_the_window(family: str) -> None:
    target, read = target_of(family), text(3, seed=3)
    kv = target.new_cache(64)
    target.prefill(read, kv)
    for round_ in range(5):
        tree = tree_of([-1, 0, 0, 2, 3, 1], seed=round_)
        start, path = kv.length, torch.tensor([0, 2, 3, 4])
        logits = target.verify(tree, kv).logits[path]
        kv.commit([start], [path.tolist()])
        read = torch.cat([read, tree.tokens[path]])
        same(logits, plain(target, read)[start:])


@every_target
def test_a_prompt_read_in_pieces_gives_the_logits_of_the_whole(family: str, attention: str) -> None:
    target, tokens = target_of(family, attention), text(20)
    expected = plain(target, tokens)
    kv = target.new_cache(20)
    for start, stop in ((0, 9), (9, 10), (10, 17)):
        output = target.prefill(tokens[start:stop], kv)
        assert output.logits.shape == (1, 64)
        same(output.logits[0], expected[stop - 1])
        same(target.head(output.features), expected[start:stop])
    for i in range(17, 20):
        same(target.step(tokens[i], kv).logits[0], expected[i])
    assert kv.length == 20


@every_target
def test_packed_documents_get_the_features_that_each_has_alone(family: str, attention: str) -> None:
    target = target_of(family, attention)
    tokens = text(48).view(2, 24)
    lengths = ((9, 11), (24,))  # the first sequence ends with four tokens of padding
    documents = torch.full((2, 24), -1)
    positions = torch.zeros(2, 24, dtype=torch.long)
    for row, sizes in enumerate(lengths):
        start = 0
        for document, size in enumerate(sizes):
            documents[row, start : start + size] = document
            positions[row, start : start + size] = torch.arange(size)
            start += size
    features = target.teacher(tokens, documents, positions)
    assert features.isfinite().all()
    assert not features.requires_grad
    for row, sizes in enumerate(lengths):
        start = 0
        for size in sizes:
            alone = plain(target, tokens[row, start : start + size])
            same(target.head(features[row, start : start + size]), alone)
            start += size


@pytest.mark.parametrize("family", FAMILIES)
def test_sdpa_and_eager_verify_a_tree_alike(family: str) -> None:
    tree, outputs = tree_of([-1, 0, 0, 1, 1, 2]), []
    for attention in ("sdpa", "eager"):
        target = target_of(family, attention)
        kv = target.new_cache(32)
        target.prefill(text(PREFIX), kv)
        outputs.append(target.verify(tree, kv).logits)
    same(*outputs)


def test_a_bool_mask_added_by_eager_attention_would_be_seen_by_these_tests() -> None:
    target = target_of("llama", "eager")
    tokens = text(8)
    wrong = target.model(
        input_ids=tokens[None], attention_mask=torch.ones(1, 1, 8, 8).tril().bool(), use_cache=False
    ).logits[0]
    assert (wrong - plain(target, tokens)).abs().max() > 100 * ATOL


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_the_window_of_these_families_matters_at_the_length_of_these_tests(family: str) -> None:
    windowed, wide = target_of(family), tiny_target(family)
    wide.backbone.window = 10 * WINDOW
    tokens, positions = text(PREFIX)[None], torch.arange(PREFIX)[None]
    features = [t.teacher(tokens, torch.zeros_like(tokens), positions) for t in (windowed, wide)]
    assert (features[0] - features[1]).abs().max() > 100 * ATOL


def test_a_target_is_what_a_drafter_is_hosted_by() -> None:
    host: DrafterHost = target_of("llama")
    assert (host.hidden_size, host.vocab_size, host.max_positions) == (32, 64, POSITIONS)
    assert host.embed(text(3)).shape == (3, 32)
    assert host.head(torch.zeros(2, 3, 32)).shape == (2, 3, 64)
    assert host.config.model_type == "llama"


def test_the_target_is_frozen_and_not_a_module() -> None:
    target = target_of("llama")
    assert not isinstance(target, torch.nn.Module)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_the_gradient_reaches_the_features_through_the_head() -> None:
    features = torch.randn(2, 32, requires_grad=True)
    target_of("llama").head(features).sum().backward()
    assert features.grad is not None
    assert features.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_beyond_the_last_one_are_refused(family: str) -> None:
    target = target_of(family)
    kv = target.new_cache(POSITIONS + 8)
    target.prefill(text(POSITIONS - 1), kv)
    fits = tree_of([-1, 0, 0])
    with pytest.raises(FalconLabError, match=f"position {POSITIONS} is beyond .* {POSITIONS} pos"):
        target.verify(fits, kv)
    target.step(text(1)[0], kv)
    with pytest.raises(FalconLabError, match=f"position {POSITIONS} is beyond"):
        target.step(text(1)[0], kv)


def test_a_wide_tree_may_end_at_the_last_position() -> None:
    target = target_of("gpt2")
    kv = target.new_cache(POSITIONS + 8)
    prefix = text(POSITIONS - 2)
    target.prefill(prefix, kv)
    tree = tree_of([-1, 0, 0, 0])
    logits = target.verify(tree, kv).logits
    read = torch.cat([prefix, tree.tokens[torch.tensor([0, 3])]])
    same(logits[3], plain(target, read)[-1])


def test_ends_come_from_the_generation_settings_the_model_and_the_tokenizer() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 8]
    model.config.eos_token_id = 9
    assert end_tokens(model, tiny_tokenizer()) == {0, 7, 8, 9}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
    ],
)
def test_the_head_scales_and_caps_as_the_model_does(family: str, config: dict[str, float]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    settings_ = AutoConfig.for_model(family, **shape, **heads, **config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings_, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    target = Target(model, tiny_tokenizer(), name=family)
    expected = plain(target, text(9))
    kv = target.new_cache(9)
    features = target.prefill(text(9), kv).features
    same(target.head(features), expected)
    same(target.copy_head()(features), expected)
    unscaled = model.get_output_embeddings()(target.prefill(text(9), target.new_cache(9)).features)
    assert (unscaled - expected).abs().max() > 100 * ATOL


def test_a_copy_of_the_head_is_trained_and_the_head_is_not() -> None:
    target = tiny_target()
    before, copied = target.model.lm_head.weight.clone(), target.copy_head()
    assert all(parameter.requires_grad for parameter in copied.parameters())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1.0)
    assert torch.equal(target.model.lm_head.weight, before)
    assert not target.model.lm_head.weight.requires_grad
