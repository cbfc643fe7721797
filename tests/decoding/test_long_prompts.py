"""Prompts that are read in chunks: the same text, without memory that grows with their square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import chain, generate, plain, speculative
from fakes.drafters import OracleDrafter, TableDrafter
from fakes.table_target import TableTarget
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, Observation
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.trees.templates import named
from tiny_models import tiny_config, tiny_target, tiny_tokenizer
from watching import Largest

VOCAB = 12


class Told(OracleDrafter, TableDrafter):
    """An oracle that checks what it observes, and notes how much was still to come."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.parts: list[tuple[int, int]] = []

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.parts.append((len(observation.tokens), observation.remaining))


@given(chunk=st.integers(1, 12), length=st.integers(1, 25), seed=st.integers(0, 9))
def test_a_drafter_is_told_of_every_chunk_and_of_what_is_to_come(
    chunk: int, length: int, seed: int
) -> None:
    target = TableTarget(VOCAB, seed=seed)
    prompt = [(7 * i + seed) % VOCAB for i in range(length)]
    expected = plain(target, prompt, 12)
    drafter = Told(VOCAB, 2, prompt + expected.tokens)
    engine = speculative(target, drafter, named("auto", 2))
    engine.decoding = DecodingConfig(prefill_chunk=chunk)
    assert generate(engine, prompt, 12).tokens == expected.tokens
    parts = drafter.parts[: -(-length // chunk)]
    assert [new for new, _ in parts[:-1]] == [chunk] * (len(parts) - 1)
    left = length
    for new, remaining in parts:
        left -= new
        assert remaining == left
    assert left == 0
    assert all(remaining == 0 for _, remaining in drafter.parts[len(parts) :])


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
@pytest.mark.parametrize(
    "options", [{}, {"phase": "absolute"}, {"query": "newest"}, {"fuse": "lstm_positionwise"}]
)
def test_chunks_change_neither_text_nor_drafts(chunk: int, options: dict[str, Any]) -> None:
    target = tiny_target("llama")
    torch.manual_seed(0)
    drafter = FalconDrafter(FalconConfig(block=2, **options), BuildContext(target)).eval()
    prompt = torch.randint(1, 64, (31,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for size in (chunk, 1000):
        engine = speculative(target, drafter, chain(6))
        engine.decoding = DecodingConfig(prefill_chunk=size)
        found.append(generate(engine, prompt, 20))
    assert found[0].tokens == found[1].tokens == plain(target, prompt, 20).tokens
    assert found[0].rounds == found[1].rounds


# --- 32k -----------------------------------------------------------------------------------------

CHUNK, CONTEXT = 1024, 32 * 1024


@pytest.fixture(scope="module")
def long_target() -> Target:
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config.num_attention_heads = config.num_key_value_heads = 1
    config.head_dim, config.max_position_embeddings = 16, CONTEXT + 64
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(config), tiny_tokenizer(), name="long")


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_is_drafted_for_without_a_square(long_target: Target) -> None:
    torch.manual_seed(0)
    drafter = FalconDrafter(FalconConfig(block=2), BuildContext(long_target)).eval()
    prompt = torch.randint(1, 64, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    decoding = DecodingConfig(prefill_chunk=CHUNK)
    expected = generate(PlainEngine(long_target, decoding=decoding), prompt, 8)
    engine = speculative(long_target, drafter, chain(4))
    engine.decoding = decoding
    watched = Largest()
    with watched:
        found = generate(engine, prompt, 8)
    assert found.tokens == expected.tokens
    assert len(found.rounds) >= 2
    assert watched.elements <= CHUNK * (CONTEXT + 64)


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(long_target: Target) -> None:
    most = CONTEXT + 64
    with pytest.raises(FalconLabError, match=f"has {most + 1} tokens and the target reads at most"):
        plain(long_target, [1] * (most + 1), 1)
