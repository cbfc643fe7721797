"""Hugging Face ``generate`` against plain decoding, on a tiny random model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.config.schema import EvaluationConfig
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.hf_generate import HfGenerate
from falcon_lab.measure.measurement import measure
from falcon_lab.sampling import Sampling
from tiny_models import tiny_target

PROMPT = torch.tensor([5, 9, 13, 21, 8])


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama")


def generate(engine: Any, **changes: Any) -> Generation:
    arguments: dict[str, Any] = {
        "max_new_tokens": 24,
        "sampling": Sampling(),
        "generator": torch.Generator().manual_seed(7),
        "stop": StopCondition(),
    }
    return engine.generate(PROMPT, **{**arguments, **changes})


def test_greedy_output_is_plain_decodings(target: Any) -> None:
    theirs, ours = generate(HfGenerate(target)), generate(PlainEngine(target))
    assert theirs.tokens == ours.tokens
    assert theirs.finish == ours.finish == "length"
    assert len(theirs.tokens) == 24
    assert theirs.rounds == []


def test_a_checkpoints_own_generation_defaults_do_not_interfere(target: Any) -> None:
    ours = generate(PlainEngine(target))
    own = target.model.generation_config
    before = own.to_dict()
    own.update(
        repetition_penalty=1.9,
        no_repeat_ngram_size=1,
        do_sample=True,
        top_k=3,
        temperature=0.5,
        num_beams=2,
        eos_token_id=ours.tokens[2],
    )
    try:
        assert generate(HfGenerate(target)).tokens == ours.tokens
    finally:
        own.update(**before)


def test_both_end_at_the_same_end_of_sequence_token(target: Any) -> None:
    full = generate(PlainEngine(target)).tokens
    # A token that first stands in mid-answer, and another that comes later.
    place = max(i for i in range(1, 12) if full[i] not in full[:i])
    stop = StopCondition({full[place], full[-1]})
    theirs, ours = (
        generate(HfGenerate(target), stop=stop),
        generate(PlainEngine(target), stop=stop),
    )
    assert theirs.tokens == ours.tokens
    assert len(theirs.tokens) <= place + 1
    assert theirs.finish == ours.finish == "eos"


def test_both_end_at_the_same_stop_string(target: Any) -> None:
    full = generate(PlainEngine(target)).tokens
    text = target.tokenizer.decode(full[6:8])
    stop = StopCondition(strings=[text], tokenizer=target.tokenizer)
    theirs, ours = (
        generate(HfGenerate(target), stop=stop),
        generate(PlainEngine(target), stop=stop),
    )
    assert theirs.tokens == ours.tokens
    assert len(theirs.tokens) <= 8
    assert theirs.finish == ours.finish == "stop"


def test_the_targets_context_limits_both(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "max_positions", len(PROMPT) + 4)
    theirs, ours = generate(HfGenerate(target)), generate(PlainEngine(target))
    assert theirs.tokens == ours.tokens
    assert (len(theirs.tokens), theirs.finish) == (4, "context")
    monkeypatch.setattr(target, "max_positions", len(PROMPT))
    with pytest.raises(FalconLabError, match="at most 5"):
        generate(HfGenerate(target))


def test_sampling_is_seeded_and_leaves_the_global_generator_alone(target: Any) -> None:
    warm = Sampling(temperature=1.5, top_k=20, top_p=0.9)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(HfGenerate(target), sampling=warm)
    assert torch.equal(torch.get_rng_state(), state)
    again = generate(HfGenerate(target), sampling=warm)
    other = generate(HfGenerate(target), sampling=warm, generator=torch.Generator().manual_seed(8))
    assert first.tokens == again.tokens
    assert first.tokens != other.tokens


def test_a_measurement_of_real_engines_finds_them_identical(target: Any) -> None:
    prompts = [
        EncodedPrompt("a", "x", ("def main",), target.tokenizer),
        EncodedPrompt("b", "x", ("return", "yes"), target.tokenizer),
    ]
    found = measure(
        {"plain": PlainEngine(target)},
        prompts,
        EvaluationConfig(max_new_tokens=8, repeats=2, warmup=1),
        stop=StopCondition(target.eos_ids),
        hf=HfGenerate(target),
        on_progress=lambda done, total, method: None,
    )
    plain, theirs = found.records["plain"], found.records["HF generate"]
    assert [row.identical for row in theirs] == [True, True]
    assert all(row.repeats_agree for rows in found.records.values() for row in rows)
    for row in plain:
        times = row.times
        assert times.prefill is not None
        assert times.decode is not None
        assert 0 < times.prefill + times.decode <= times.wall
        assert len(row.rounds) == len(row.tokens) - len(row.turns)
    assert theirs[0].times.decode is None
    assert theirs[1].turns[1].prompt_tokens == plain[1].turns[1].prompt_tokens
