"""Drafting through compiled passes and graphs, which stand-ins take the place of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafter import SpsDrafter
from sps_cases import (
    FAMILIES,
    ROOT,
    VOCAB,
    chain,
    drafter,
    dynamic,
    engine,
    generate,
    model,
    plain,
    target,
    tell,
    tokenizer,
)

from falcon_lab.decoding.batch_engine import BatchEngine
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.protocols import BuildContext, Compilable, Frontier
from falcon_lab.testing.compiling import Pretend, Repeating

LENGTHS = [9, 1, 2, 4, 1, 5]


def quiet(line: str) -> None:
    """Takes a line and drops it."""


def loaded(folder: Path, family: str) -> SpsDrafter:
    """A model that was there before; Gemma's has layers with a sliding window."""
    model(family, seed=3).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SpsDrafter(SpsConfig(model=str(folder)), BuildContext(target(family))).eval()


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
@pytest.mark.parametrize("tree", [chain(4), dynamic(8)])
def test_greedy_text_with_everything_compiled_is_the_target_s(family: str, tree: Any) -> None:
    compiler = Pretend()
    made = drafter(family).compiled(quiet, compiler)
    one = engine(family, made, tree)
    one.target = target(family).compiled(quiet, compiler)
    for prompt, new in (([3, 1, 4, 1, 5], 30), ([2], 20)):
        assert generate(one, prompt, new).tokens == plain(family, prompt, new)
    assert any(name.startswith("target") for name in compiler.names)
    assert any(name.startswith("drafter") for name in compiler.names)


def test_the_passes_of_a_round_are_there_before_it_is_timed() -> None:
    compiler = Pretend()
    made = drafter().compiled(quiet, compiler)
    assert isinstance(made, Compilable)
    made.prepare(5)
    assert compiler.names == [f"drafter-{rows}-rows" for rows in (1, 2, 4, 6)]
    generate(engine("llama", made, chain(4)), [2, 4], 20)
    assert len(compiler.names) == 4


@pytest.mark.parametrize("graphs", [False, True])
def test_memory_is_counted_exactly(graphs: bool) -> None:
    recorder = Repeating() if graphs else None
    made, tree = drafter().compiled(quiet, Pretend(), recorder), chain(3)
    for positions in (40, 10, 90):
        expected = made.kv_bytes(positions, tree)
        made.reset(torch.tensor(1))
        made.reserve(positions, tree)
        tell(made, [2, 3, 4])
        made.draft(ROOT)
        assert made._drafting._cache is not None
        assert made._drafting._cache.nbytes == expected
        assert made.kv_held == (expected if graphs else 0)


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
    together = BatchEngine(engine("llama", made, chain(3)), 2).generate(
        [torch.tensor(prompt) for prompt in prompts],
        max_new_tokens=16,
        sampling=Sampling(),
        generators=[torch.Generator() for _ in prompts],
        stop=StopCondition(),
    )
    assert [one.tokens for one in together] == [plain("llama", prompt, 16) for prompt in prompts]
    assert compiler.calls == (0 if recorder is None else recorder.replays)
