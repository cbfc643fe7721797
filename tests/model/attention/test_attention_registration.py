"""Backends inside Hugging Face's modules, for every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from fakes.decoding import generate, plain, speculative
from fakes.drafters import OracleDrafter
from falcon_lab.model.attention.backend import Partial
from falcon_lab.model.attention.merged import Merged
from falcon_lab.model.attention.registration import (
    BLOCK_SPARSE,
    RegisteredAttention,
    backend_of,
    register,
)
from falcon_lab.model.attention.torch_flash import TorchFlash
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.families import FULL
from falcon_lab.model.lean import FAMILIES as LEAN
from falcon_lab.model.self_check import check_target
from falcon_lab.model.target import Target
from falcon_lab.tree import TokenTree, ancestor_matrix
from falcon_lab.trees.templates import named
from tiny_models import FAMILIES, tiny_model, tiny_tokenizer

ATOL = 2e-5
LAYERS = 3

every_way = pytest.mark.parametrize(
    ("family", "lean"), [(f, lean) for f in FAMILIES for lean in (False, True)[: 1 + (f in LEAN)]]
)


@dataclass(frozen=True)
class Spy:
    """PyTorch's kernel, which counts its calls and those with a causal order."""

    calls: list[bool] = field(default_factory=list)
    name: str = "spy_flash"

    def refuses(self, *_: Any) -> None:
        return None

    def __call__(self, *states: Tensor, scale: float, causal: bool = False) -> Partial:
        self.calls.append(causal)
        return TorchFlash()(*states, scale=scale, causal=causal)

    def drain(self) -> list[bool]:
        calls, self.calls[:] = list(self.calls), []
        return calls


def target_with(family: str, backend: Merged | None, *, lean: bool = False) -> Target:
    model = tiny_model(family, layers=LAYERS)
    model.set_attn_implementation("sdpa" if backend is None else register(backend))
    return Target(model, tiny_tokenizer(), name=f"tiny-{family}", lean=lean)


def merging_layers(target: Target) -> int:
    kinds = getattr(target.config, "layer_types", None) or target.backbone.kinds * LAYERS
    return sum(kind == FULL for kind in kinds)


def tree() -> TokenTree:
    parents = torch.tensor([-1, 0, 0, 2, 1, 4])
    return TokenTree(
        tokens=torch.tensor([7, 8, 9, 10, 11, 12]),
        parents=parents,
        depth=torch.tensor([0, 1, 1, 2, 2, 3]),
        ancestors=ancestor_matrix(parents),
        proposal="deterministic",
        log_q=torch.zeros(6),
    )


def decode(target: Target, note: Any = list) -> tuple[Tensor, list[Any]]:
    """Logits of two chunks of a prompt, a tree, a commit and a step; what ``note`` says of each."""
    cache, noted = target.new_cache(32), []
    note()
    logits = []
    for chunk in (torch.arange(2, 9), torch.arange(9, 13)):
        logits.append(target.prefill(chunk, cache).logits)
        noted.append(note())
    logits.append(target.verify(tree(), cache).logits)
    noted.append(note())
    cache.commit([11], [[0, 1, 4]])
    logits.append(target.step(torch.tensor(5), cache).logits)
    noted.append(note())
    return torch.cat(logits), noted


@every_way
def test_every_family_says_the_same_with_a_backend(family: str, lean: bool) -> None:
    spy = Spy()
    target = target_with(family, Merged(spy), lean=lean)
    logits, calls = decode(target, spy.drain)
    assert torch.allclose(logits, decode(target_with(family, None))[0], atol=ATOL)
    full = merging_layers(target)
    ordered = target.backbone.window is None  # a window is written into whole masks
    assert sorted(calls[0]) == ([True] * full if ordered else [])
    assert sorted(calls[1]) == [False] * full + [True] * full * ordered
    assert calls[2] == [False] * full
    assert not calls[3]  # one row needs no mask, and PyTorch no help
    check_target(target)


@pytest.mark.parametrize("lean", [False, True])
def test_short_contexts_go_through_whole_masks_where_merging_does_not_pay(lean: bool) -> None:
    spy = Spy()
    target = target_with("llama", Merged(spy, least=12), lean=lean)
    logits, calls = decode(target, spy.drain)
    assert torch.allclose(logits, decode(target_with("llama", None))[0], atol=ATOL)
    assert not calls[2]  # the tree stands behind 11 rows
    assert calls[0] == [True] * LAYERS  # a text's order is always the kernel's
    spy = Spy()
    assert decode(target_with("llama", Merged(spy, least=11), lean=lean), spy.drain)[1][2]


@every_way
def test_greedy_speculation_writes_what_plain_sdpa_writes(family: str, lean: bool) -> None:
    prompt, new = [5, 9, 3], 16
    truth = plain(target_with(family, None), prompt, new).tokens
    target = target_with(family, Merged(TorchFlash()), lean=lean)
    drafter = OracleDrafter(target.vocab_size, 2, [*prompt, *truth])
    out = generate(speculative(target, drafter, named("auto", 2)), prompt, new)
    assert out.tokens == truth
    assert sum(round_.accepted for round_ in out.rounds) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_packed_documents_and_hugging_face_s_own_ways_are_sdpa_s(family: str) -> None:
    spy = Spy()
    ours, theirs = target_with(family, Merged(spy)), target_with(family, None)
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 0, 0]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]])
    packed = [t.teacher(tokens, documents, positions) for t in (ours, theirs)]
    assert torch.equal(*packed)
    written = [
        t.model.generate(tokens[:, :6], max_new_tokens=8, do_sample=False) for t in (ours, theirs)
    ]
    assert torch.equal(*written)
    assert not spy.calls


def test_gradients_flow_through_sdpa() -> None:
    spy = Spy()
    target = target_with("llama", Merged(spy))
    embeddings = torch.randn(1, 4, 32, requires_grad=True)
    hidden = target.backbone(
        embeddings=embeddings,
        positions=torch.arange(4)[None],
        mask=torch.ones(1, 4, 4, dtype=torch.bool).tril(),
        causal=True,
    )
    hidden.sum().backward()
    assert embeddings.grad is not None
    assert not spy.calls


@pytest.mark.parametrize("other", ["softcap", "s_aux", "position_bias"])
def test_scores_that_are_not_plain_are_left_to_sdpa(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def theirs(module: Any, query: Tensor, *states: Any, **settings: Any) -> tuple[Tensor, None]:
        told.append(settings | {"mask": states[2]})
        return query, None

    monkeypatch.setattr(AttentionInterface, "__getitem__", lambda self, name: theirs)
    spy = Spy()
    query, keys = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    attention = RegisteredAttention(Merged(spy))
    attention(SimpleNamespace(), query, keys, keys, mask, **{other: torch.ones(1)})
    [call] = told
    assert call[other] is not None
    assert call["mask"].shape == (1, 1, 3, 5)
    assert call["mask"][..., :2].all()
    assert torch.equal(call["mask"][..., 2:], mask)
    assert not spy.calls


def test_a_name_is_a_backend_s_and_transformers_reads_nothing_into_it() -> None:
    one, other = register(Merged(TorchFlash())), register(Merged(TorchFlash(), 512))
    assert one != other
    assert backend_of(one) == Merged(TorchFlash())
    assert backend_of(other) == Merged(TorchFlash(), 512)
    assert backend_of("sdpa") is None
    assert "flash" not in one  # which transformers would take for its own
    assert AttentionMaskInterface()[one] is AttentionMaskInterface()["sdpa"]


def test_registering_twice_leaves_one_name() -> None:
    register(Merged(TorchFlash()))
    before = set(AttentionInterface())
    register(Merged(TorchFlash()))
    assert set(AttentionInterface()) == before


def test_a_drafter_s_blocks_do_not_inherit_the_backend() -> None:
    target = target_with("llama", Merged(TorchFlash()))
    blocks = Backbone.short(target.config, 1)
    assert blocks.implementation == BLOCK_SPARSE
    assert backend_of(blocks.implementation) is None
