"""What a target puts out of its layers is what Hugging Face's models say of themselves."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from fakes.recording import Refusing, Repeating
from falcon_lab.errors import FalconLabError
from falcon_lab.model.backbone import Backbone, Taps
from falcon_lab.model.lean import FAMILIES as LEAN
from falcon_lab.model.target import Target, TargetOutput
from falcon_lab.testing.compiling import Pretend, traced
from graph_cases import tree_of
from tiny_models import FAMILIES, tiny_target

ATOL = 5e-5
LAYERS = (2, 0, 1)
PARENTS = [-1, 0, 0, 1, 1, 2, 4]

every_way = pytest.mark.parametrize(
    ("family", "lean"), [(f, lean) for f in FAMILIES for lean in (False, True)[: 1 + (f in LEAN)]]
)


@cache
def target(family: str = "llama", lean: bool = False) -> Target:
    found = tiny_target(family, layers=3)
    found.backbone = Backbone(found.model.get_decoder(), lean=lean)
    return found


def text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 64, (count,), generator=torch.Generator().manual_seed(seed))


def theirs(tokens: Tensor, family: str = "llama") -> Tensor:
    """``[T, L, H]`` of the whole model: no cache, no mask of ours."""
    with torch.no_grad():
        states = target(family).model(
            input_ids=tokens[None], use_cache=False, output_hidden_states=True
        )
    return torch.stack([states.hidden_states[layer][0] for layer in LAYERS], dim=1)


def same(ours: Tensor | None, expected: Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, expected, atol=ATOL, rtol=1e-5)


def of_paths(prefix: Tensor, family: str = "llama") -> Tensor:
    """``[N, L, H]``: each node read at the end of its path."""
    tree = tree_of(PARENTS)
    paths = [torch.cat([prefix, tree.tokens[row]]) for row in tree.ancestors]
    return torch.stack([theirs(path, family)[-1] for path in paths])


@every_way
def test_prompts_steps_and_trees_are_tapped_as_the_model_says(family: str, lean: bool) -> None:
    tapped, prefix = target(family, lean).tapped(LAYERS), text(12)
    cache = tapped.new_cache(40)
    same(tapped.prefill(prefix, cache, chunk=5).taps, theirs(prefix, family))
    same(tapped.verify(tree_of(PARENTS), cache).taps, of_paths(prefix, family))
    cache.truncate(12)
    same(tapped.step(text(1)[0], cache).taps, theirs(torch.cat([prefix, text(1)]), family)[-1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_tapped_as_if_each_stood_alone(family: str) -> None:
    first, second = text(9, 1), text(7, 2)
    documents = torch.tensor([[0] * 9 + [1] * 7])
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    packed = torch.cat([first, second])[None], documents, positions
    features, taps = target(family).tapped(LAYERS).tapped_teacher(*packed)
    same(taps[0], torch.cat([theirs(first, family), theirs(second, family)]))
    assert torch.equal(features, target(family).teacher(*packed))


@every_way
def test_rows_of_a_batch_are_tapped_as_alone(family: str, lean: bool) -> None:
    tapped, lengths = target(family, lean).tapped(LAYERS), (12, 5)
    kv = tapped.new_batch_cache(2, 40)
    for row, length in enumerate(lengths):
        own = kv.open(row)
        tapped.prefill(text(length, row), own)
        kv.fill(row, own.length)
    tree, root = tree_of(PARENTS), tree_of([-1])
    outputs = tapped.verify_batch([tree, root], kv).split([tree.nodes, 1])
    same(outputs[0].taps, of_paths(text(12, 0), family))
    same(outputs[1].taps, theirs(torch.cat([text(5, 1), root.tokens]), family)[-1:])
    kv.commit(kv.lengths, [[0], [0]])
    both = tapped.step_batch(text(2, 3), kv)
    ends = [torch.cat([text(n, r), t.tokens[:1], text(2, 3)[r : r + 1]])
            for r, (n, t) in enumerate(zip(lengths, (tree, root), strict=True))]  # fmt: skip
    same(both.taps, torch.stack([theirs(end, family)[-1] for end in ends]))


def test_a_target_is_as_it_was_when_nothing_is_tapped() -> None:
    plain, tapped = target(), target().tapped(LAYERS)
    outputs = []
    for one in (plain, tapped, tapped.tapped(())):
        cache = one.new_cache(20)
        one.prefill(text(6), cache)
        outputs.append(one.verify(tree_of(PARENTS), cache))
    assert [output.taps is None for output in outputs] == [True, False, True]
    for output in outputs[1:]:
        assert torch.equal(output.logits, outputs[0].logits)
        assert torch.equal(output.features, outputs[0].features)


def decode(one: Target) -> list[TargetOutput]:
    """Prompt, tree and step."""
    cache = one.new_cache(60)
    one.prefill(text(9), cache)
    found = [one.verify(tree_of(PARENTS), cache)]
    cache.commit([9], [[0, 1]])
    return [*found, one.step(text(1)[0], cache)]


@pytest.mark.parametrize("compiler", [Pretend(), traced])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_passes_put_out_taps_too(compiler: Pretend, compiled_first: bool) -> None:
    lines: list[str] = []
    if compiled_first:
        fast = target().compiled(lines.append, compiler).tapped(LAYERS)
    else:
        fast = target().tapped(LAYERS).compiled(lines.append, compiler)
    for ours, expected in zip(decode(fast), decode(target().tapped(LAYERS)), strict=True):
        same(ours.taps, expected.taps)  # type: ignore[arg-type]
        same(ours.logits, expected.logits)
    assert all(line.startswith("target-tapped-") for line in lines)


@pytest.mark.parametrize("recorder", [Repeating(), Refusing(0)])
def test_graphs_put_out_taps_too(recorder: Repeating) -> None:
    lines: list[str] = []
    fast = target().compiled(lines.append, recorder=recorder).tapped(LAYERS)
    for ours, expected in zip(decode(fast), decode(target().tapped(LAYERS)), strict=True):
        same(ours.taps, expected.taps)  # type: ignore[arg-type]
        same(ours.logits, expected.logits)


def test_engines_that_tap_the_same_layers_share_what_is_compiled() -> None:
    compiler = Pretend()
    fast = target().compiled(lambda line: None, compiler)
    for _ in range(2):
        decode(fast.tapped(LAYERS))
    decode(fast)
    names = [name for name in compiler.names if "tapped" in name]
    assert len(names) == len(set(names)) == len(compiler.names) - len(names)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((3,), "taps layer 3, and the target has the layers 0 .embeddings. to 2"),
        ((-1,), "taps layer -1"),
        ((1, 1), "taps a layer twice"),
    ],
)
def test_layers_that_cannot_be_tapped_are_refused(layers: tuple[int, ...], said: str) -> None:
    with pytest.raises(FalconLabError, match=said):
        target().tapped(layers)


@pytest.mark.parametrize("states", [None, (torch.zeros(1),)])
def test_a_model_that_keeps_its_layers_to_itself_is_refused(
    states: tuple[Tensor, ...] | None,
) -> None:
    with pytest.raises(FalconLabError, match="does not return the hidden states"):
        Taps((0,)).see_all(states, 3)
