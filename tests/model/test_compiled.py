"""Compiled passes of the target, with a compiler that compiles nothing, and once for real."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.model import compiled
from falcon_lab.model.compiled import PADDING, SIZES, CompiledPass, matrix_kernels
from falcon_lab.model.passes import TokensForward, size_for
from falcon_lab.model.target import Target
from falcon_lab.testing.compiling import Pretend, traced
from falcon_lab.tree import TokenTree, ancestor_matrix
from tiny_models import FAMILIES, tiny_target


def _tree(nodes: int, seed: int = 0) -> TokenTree:
    drawn = torch.Generator().manual_seed(seed)
    parents = torch.tensor(
        [-1, *(int(torch.randint(0, i, (), generator=drawn)) for i in range(1, nodes))]
    )
    ancestors = ancestor_matrix(parents)
    tokens = torch.randint(3, 12, (nodes,), generator=drawn)
    depth = ancestors.sum(1) - 1
    return TokenTree(tokens, parents, depth, ancestors, "deterministic", torch.zeros(nodes))


def _decode(target: Target) -> list[Tensor]:
    """A prompt, trees of many sizes with a path of each kept, and steps between them."""
    cache = target.new_cache(200)
    found = [target.prefill(torch.arange(9) % 12, cache).logits]
    for turn, nodes in enumerate((2, 3, 5, 8, 13, 20, 1)):
        start = cache.length
        output = target.verify(_tree(nodes, turn), cache)
        found += [output.logits, output.features]
        deepest = _tree(nodes, turn).depth.argmax()
        path = _tree(nodes, turn).ancestors[deepest].nonzero().flatten()
        cache.commit([start], [path.tolist()], [path])
        found.append(target.step(torch.tensor(5), cache).logits)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_passes_say_what_the_modules_say(family: str) -> None:
    target, compiler = tiny_target(family, vocab=12), Pretend()
    fast = target.compiled(lambda line: None, compiler)
    for ours, theirs in zip(_decode(fast), _decode(target), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert compiler.calls == 14
    assert set(compiler.names) == {f"target-{n}-tokens" for n in (1, 2, 4, 6, 8, 16, 24)}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "phi3"])
def test_the_modules_of_a_family_can_be_traced(family: str) -> None:
    target = tiny_target(family, vocab=12)
    outputs = []
    for one in (target.compiled(lambda line: None, traced), target):
        cache = one.new_cache(60)
        one.prefill(torch.arange(9) % 12, cache)
        outputs.append(one.verify(_tree(3), cache).logits)
    assert torch.allclose(*outputs, atol=1e-5)


def test_trees_larger_than_any_pass_go_through_the_modules() -> None:
    target, compiler = tiny_target(vocab=12), Pretend()
    fast = target.compiled(lambda line: None, compiler)
    outputs = []
    for one in (fast, target):
        cache = one.new_cache(100)
        one.prefill(torch.arange(3), cache)
        outputs.append(one.verify(_tree(SIZES[-1] + 1), cache).logits)
    assert torch.equal(*outputs)
    assert compiler.calls == 0


def test_the_passes_of_a_tree_are_there_before_it_is_verified() -> None:
    target, compiler = tiny_target(vocab=12), Pretend()
    target.compiled(lambda line: None, compiler).prepare(7)
    assert compiler.names == [f"target-{n}-tokens" for n in (1, 2, 4, 6, 8)]


def test_a_size_is_the_smallest_that_holds_the_tokens() -> None:
    assert [size_for(count, SIZES) for count in (1, 3, 8, 9, 64)] == [1, 4, 8, 10, 64]


def test_the_memory_of_a_compiled_target_is_counted_with_its_padding() -> None:
    target = tiny_target()
    fast = target.compiled(lambda line: None, Pretend())
    assert fast.kv_bytes(10) == target.kv_bytes(10 + PADDING)
    cache = fast.new_cache(10)
    fast.prefill(torch.arange(3), cache)
    assert cache.nbytes == fast.kv_bytes(10)


@pytest.mark.parametrize(
    ("dtypes", "units", "timed"),
    [
        ({torch.float32, torch.int64}, {}, True),
        ({torch.bfloat16, torch.float32}, {"avx512_bf16": True}, False),
        ({torch.float16}, {}, False),
        ({torch.bfloat16}, {"amx_bf16": True}, True),
    ],
)
def test_inductors_own_kernels_are_timed_where_they_know_the_type_of_the_weights(
    dtypes: set[torch.dtype],
    units: dict[str, bool],
    timed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "cpu_units", lambda: units)
    assert matrix_kernels(dtypes)["max_autotune_gemm"] is timed


def test_weights_are_packed_whether_or_not_the_caller_wants_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor packs ("freezes") weights without gradients alone, and is silent otherwise."""
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    wanted = []

    def build(program: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        wanted.append((torch.is_grad_enabled(), inductor_configs["freezing"]))
        Path(package_path).touch()

    package = SimpleNamespace(loader=SimpleNamespace(boxed_run=None))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", build)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_, **__: package)
    with torch.enable_grad():
        tiny_target(vocab=12).compiled(lambda line: None).prepare(1)
    assert wanted == [(False, True)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_a_really_compiled_pass_says_what_the_modules_say(
    dtype: torch.dtype, near: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    found = tiny_target(vocab=12)
    found.model.to(dtype)
    target = Target(found.model, found.tokenizer, name="tiny", lean=True)
    lines: list[str] = []
    for _ in range(2):  # the second time it is loaded
        fast = target.compiled(lines.append)
        for context in (5, 40):
            outputs: list[Any] = []
            for one in (fast, target):
                cache = one.new_cache(60)
                one.prefill(torch.arange(context) % 12, cache)
                outputs.append(one.verify(_tree(3), cache).logits)
            assert torch.allclose(*outputs, atol=near)
    assert [line.startswith("compiling target-4-tokens, once: kept in") for line in lines] == [True]
    assert len(list((tmp_path / "compiled").glob("*.pt2"))) == 1


def test_native_code_of_another_user_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    other = SimpleNamespace(st_uid=os.geteuid() + 4711)
    monkeypatch.setattr(Path, "stat", lambda path, **_: other)
    with pytest.raises(FalconLabError, match=r"compiled: belongs to user \d+.*FALCON_LAB_CACHE"):
        tiny_target(vocab=12).compiled(lambda line: None).prepare(1)


def test_what_cannot_be_traced_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    target = tiny_target(vocab=12)

    def look(features: Tensor) -> Tensor:
        return features if bool(features.sum() > 0) else -features

    forward = TokensForward(target.backbone, look, "mine")
    made = CompiledPass(forward, lambda line: None)
    with pytest.raises(FalconLabError, match=r"mine-1-tokens cannot be compiled \(.*compile=none"):
        made.prepare(2)
