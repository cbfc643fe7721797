"""Drafting through compiled passes: against the modules, with a compiler that compiles nothing."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.decoding import chain, generate, plain, speculative
from falcon_cases import HIDDEN, drafter, rows
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fuse, Fusing, State
from falcon_lab.interfaces import BuildContext, Frontier, Observation
from falcon_lab.model.backbone import Backbone
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.testing.compiling import Pretend, traced
from falcon_lab.trees.templates import named
from tiny_models import tiny_target

ROOT = Frontier.root(torch.device("cpu"))


def _pair(**options: Any) -> tuple[FalconDrafter, FalconDrafter, Pretend]:
    compiler = Pretend()
    made = drafter(**options)
    return made, made.compiled(lambda line: None, compiler), compiler


BRANCHES = ([0], [0, 0, 0], [2, 0])


def _rounds(
    made: FeatureHead, lengths: list[int], branches: Sequence[list[int]] = BRANCHES
) -> list[Any]:
    """Logits and features of rounds of several passes, all but the first of them branching."""
    generator = torch.Generator().manual_seed(0)
    tokens, features = rows(sum(lengths), 0)
    made.reset(tokens[0])
    found, done = [], 0
    for new in lengths:
        fresh = slice(done, done + new)
        made.observe(Observation(tokens[fresh], features[fresh]))
        done += new
        outputs = [made.draft(ROOT)]
        for parents in branches:
            drawn = torch.randint(0, 12, (len(parents), made.block), generator=generator)
            outputs.append(made.draft(Frontier(drawn, torch.tensor(parents))))
        found += outputs
    return found


@pytest.mark.parametrize("block", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"phase": "aligned"},
        {"phase": "absolute", "layers": 2},
        {"phase": "absolute", "family": "gpt2"},
        {"fuse": "linear", "family": "gemma3"},
        {"fuse": "lstm_positionwise"},
        {"query": "newest"},
        {"query": "mapped", "fuse": "linear", "draft_vocabulary": 9},
        {"query": "mapped", "phase": "absolute", "family": "gpt2"},
    ],
)
def test_compiled_passes_predict_what_the_modules_predict(
    block: int, options: dict[str, Any]
) -> None:
    made, compiled, compiler = _pair(block=block, **options)
    lengths = [20, 1, 2, 3, 5, 8, 1, 1, 18, 4]
    for ours, theirs in zip(_rounds(compiled, lengths), _rounds(made, lengths), strict=True):
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
        assert torch.allclose(ours.features, theirs.features, atol=1e-5)
    # The prompt's first pass and the long round's are the modules' own.
    assert compiler.calls == 4 * len(lengths) - 2


class Counting(Fusing):
    """Remembers how many rows there were, and the last of them."""

    def forward(self, rows: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        seen = rows.cumsum(1) + (0 if state is None else state[0][0].unsqueeze(1))
        return seen[..., :HIDDEN] + seen[..., HIDDEN:], (
            seen[:, -1:].transpose(0, 1),
            rows[None, :, -1],
        )


def test_a_fuse_of_somebody_else_s_is_compiled_with_its_state() -> None:
    target, compiler = tiny_target("llama"), Pretend()
    head = FeatureHead(target, Counting(), Backbone.short(target.config, 1), block=2).eval()
    compiled = head.compiled(lambda line: None, compiler)
    lengths = [5, 3, 1, 4]
    for ours, theirs in zip(_rounds(compiled, lengths), _rounds(head, lengths), strict=True):
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
    assert compiler.calls == 4 * len(lengths) - 1


def test_decoder_blocks_with_a_sliding_window_are_compiled_with_it() -> None:
    target, compiler = tiny_target("gemma3"), Pretend()
    base = copy.deepcopy(target.model.get_decoder())
    base.set_input_embeddings(None)
    blocks = Backbone(base, width=target.hidden_size)
    assert blocks.window is not None
    head = FeatureHead(
        target, Fuse("linear", HIDDEN, layers=1, dropout=0.0), blocks, block=2
    ).eval()
    compiled = head.compiled(lambda line: None, compiler)
    lengths, deep = [5, 3, 1, 4, 2], [[0, 0], *([[0, 1]] * 4)]  # deeper than the window is wide
    both = _rounds(compiled, lengths, deep), _rounds(head, lengths, deep)
    for ours, theirs in zip(*both, strict=True):
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
    assert compiler.calls == 6 * len(lengths) - 1


@pytest.mark.parametrize(
    "options",
    [
        {"fuse": "linear", "draft_vocabulary": 9},
        {},
        {"fuse": "lstm_positionwise"},
        {"query": "mapped", "fuse": "linear"},
    ],
)
def test_the_passes_of_every_fuse_can_be_traced(options: dict[str, Any]) -> None:
    made = drafter(block=2, **options)
    compiled = made.compiled(lambda line: None, traced)
    for ours, theirs in zip(_rounds(compiled, [5, 3]), _rounds(made, [5, 3]), strict=True):
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)


def test_a_pass_is_compiled_once_for_rounds_of_like_length() -> None:
    _, compiled, compiler = _pair(block=2)
    _rounds(compiled, [20, 3, 4, 3, 4])
    assert sorted(compiler.names) == sorted(set(compiler.names))
    assert "drafter-1-by-4-after-0-for-2" in compiler.names


def test_compiled_drafters_share_the_weights_and_leave_the_modules_drafting() -> None:
    made, compiled, compiler = _pair(block=2)
    assert compiled.fuse is made.fuse
    assert (compiled.is_compiled, made.is_compiled) == (True, False)
    _rounds(made, [20, 3])
    assert compiler.calls == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize(
    ("block", "fuse", "query"),
    [
        (1, "linear", "block"),
        (1, "lstm", "block"),
        (2, "lstm", "block"),
        (2, "linear", "mapped"),
        (3, "lstm", "newest"),
    ],
)
def test_greedy_speculation_with_everything_compiled_writes_the_target_s_text(
    family: str, block: int, fuse: str, query: str
) -> None:
    target, compiler = tiny_target(family, vocab=12), Pretend()
    torch.manual_seed(3)
    config = FalconConfig(block=block, fuse=fuse, query=query)
    made = FalconDrafter(config, BuildContext(host=target)).eval()
    fast = target.compiled(lambda line: None, compiler)
    falcon = made.compiled(lambda line: None, compiler)
    for tree in (chain(2 * block), named("auto", block), named("vicuna", block)):
        for prompt in ([3, 1, 4, 1, 5], [2]):
            expected = plain(target, prompt, 40)
            got = generate(speculative(fast, falcon, tree), prompt, 40)
            assert got.tokens == expected.tokens
            assert generate_plain(fast, prompt) == expected.tokens
    assert compiler.calls > 0


def generate_plain(target: Any, prompt: list[int]) -> list[int]:
    found: list[int] = plain(target, prompt, 40).tokens
    return found


def test_the_passes_of_a_round_are_there_before_it_is_timed() -> None:
    _, compiled, compiler = _pair(block=3)
    compiled.prepare(7)
    assert compiler.names == [
        f"drafter-1-by-{new}-after-{older}-for-3"
        for new, older in ((1, 2), (2, 1), (3, 0), (4, 0), (6, 0), (8, 0))
    ]
    ready = len(compiler.names)
    tokens, features = rows(20 + 28, 0)
    compiled.reset(tokens[0])
    compiled.observe(Observation(tokens[:20], features[:20]))
    compiled.draft(ROOT)
    done = 20
    for new in range(1, 8):
        compiled.observe(Observation(tokens[done : done + new], features[done : done + new]))
        done += new
        compiled.draft(ROOT)
        compiled.draft(Frontier(tokens[None, :3], torch.tensor([0])))
    assert len(compiler.names) == ready
