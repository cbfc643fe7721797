"""Drafting through compiled passes and graphs, which stand-ins take the place of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_lab_sps.drafter import SpsDrafter
from sps_cases import FAMILIES, ROOT, VOCAB, drafter, engine, target, tell

from falcon_lab.interfaces import Frontier
from falcon_lab.testing import TREES, plain_text, write, write_together
from falcon_lab.testing.compiling import Pretend, Repeating, traced
from falcon_lab.testing.targets import tiny_model, tiny_tokenizer

LENGTHS = [9, 1, 2, 4, 1, 5]


def quiet(line: str) -> None:
    """Drop the line."""


def loaded(folder: Path, family: str) -> SpsDrafter:
    """A model that was there before; Gemma's has layers with a sliding window."""
    tiny_model(family, seed=3, vocab=VOCAB).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return drafter(family, stir=0, model=str(folder))


@torch.inference_mode()
def rounds(made: SpsDrafter, seed: int = 0) -> list[Any]:
    """Logits of rounds of a chain, and of rounds that branch, deeper than a window is wide."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    made.reset(torch.tensor(3))
    found = []
    for number, new in enumerate(LENGTHS):
        tell(made, text(new))
        found.append(made.draft(ROOT).logits)
        branching = ([0, 0, 0], [2, 0], [1, 1, 0], *([[0, 1]] * 5))
        for parents in ([[0]] * 8) if number % 2 else branching:
            blocks = Frontier(torch.tensor(text(len(parents)))[:, None], torch.tensor(parents))
            found.append(made.draft(blocks).logits)
    return found


def same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fresh", [True, False])
def test_compiled_passes_and_graphs_predict_what_the_model_predicts(
    fresh: bool, family: str, tmp_path: Path
) -> None:
    made = drafter(family) if fresh else loaded(tmp_path, family)
    compiler, recorder = Pretend(), Repeating()
    compiled, replayed = made.compiled(quiet, compiler), made.compiled(quiet, recorder=recorder)
    assert [one.is_compiled for one in (made, compiled, replayed)] == [False, True, True]
    for seed in (0, 1):
        expected = rounds(made, seed)
        same(rounds(compiled, seed), expected)
        same(rounds(replayed, seed), expected)
    assert compiler.calls == recorder.replays == 2 * (9 * len(LENGTHS) - 1)  # but the prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_passes_can_be_traced(family: str) -> None:
    made = drafter(family, draft_vocabulary=7)
    same(rounds(made.compiled(quiet, traced)), rounds(made))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_with_everything_compiled_is_the_target_s(family: str, tree: str) -> None:
    compiler, model = Pretend(), target(family)
    one = engine(family, drafter(family).compiled(quiet, compiler), TREES[tree])
    one.target = model.compiled(quiet, compiler)
    for prompt, new in (([3, 1, 4, 1, 5], 30), ([2], 20)):
        assert write(one, prompt, new).tokens == plain_text(model, prompt, new)
    assert any(name.startswith("target") for name in compiler.names)
    assert any(name.startswith("drafter") for name in compiler.names)


def test_the_passes_of_a_round_are_there_before_it_is_timed() -> None:
    compiler = Pretend()
    made = drafter().compiled(quiet, compiler)
    made.prepare(6)
    assert compiler.names == [f"drafter-{new}-tokens" for new in (1, 2, 4, 6)]
    write(engine("llama", made, TREES["a chain"]), [2, 4], 20)
    assert len(compiler.names) == 4


@pytest.mark.parametrize("graphs", [False, True])
def test_memory_is_counted_exactly(graphs: bool) -> None:
    recorder = Repeating() if graphs else None
    made = drafter().compiled(quiet, Pretend(), recorder)
    tree = engine("llama", made, TREES["a dynamic tree"]).tree_builder
    for positions in (40, 10, 90):
        expected = made.kv_bytes(positions, tree)
        made.reset(torch.tensor(1))
        made.reserve(positions, tree)
        tell(made, [2, 3, 4])
        made.draft(ROOT)
        assert made._drafting._cache is not None
        assert made._drafting._cache.nbytes == expected
        assert made.kv_allocated == (expected if graphs else 0)


def test_rows_that_outgrow_their_memory_are_read_right() -> None:
    made, compiler, recorder = drafter(), Pretend(), Repeating()
    outputs = []
    for one in (made, made.compiled(quiet, compiler), made.compiled(quiet, recorder=recorder)):
        one.reset(torch.tensor(1))
        one._drafting.expect(4)
        found = []
        for new in range(1, 14):
            tell(one, [1 + new % 7] * new)
            found.append(one.draft(ROOT).logits)
        outputs.append(found)
    same(outputs[1], outputs[0])
    same(outputs[2], outputs[0])
    assert compiler.calls > 0


@pytest.mark.parametrize("recorder", [None, Repeating()])
def test_a_batch_goes_through_the_modules(recorder: Repeating | None) -> None:
    compiler, prompts = Pretend(), [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8]]
    made = drafter().compiled(quiet, compiler, recorder)
    together = write_together(engine("llama", made, TREES["a chain"]), prompts, 16)
    alone = [plain_text(target(), prompt, 16) for prompt in prompts]
    assert [one.tokens for one in together] == alone
    assert compiler.calls == 0
    assert recorder is None or recorder.replays == 0
