"""Memory is counted first, and a text that does not fit is refused with the length that would."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import chain, generate, speculative
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding import memory
from falcon_lab.decoding.memory import check_kv_memory
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.memory import GIB
from falcon_lab.plugins.builtins import FalconConfig
from tiny_models import tiny_target

CPU = torch.device("cpu")
PROMPT, NEW = list(range(1, 41)), 20


def refusal(call: Any) -> tuple[str, int]:
    """The message, and the length that it says would fit."""
    with pytest.raises(FalconLabError) as caught:
        call()
    found = re.search(r"at most (\d+) tokens fit", str(caught.value))
    return str(caught.value), int(found[1]) if found else 0


@given(per_token=st.integers(1, 1000), fixed=st.integers(0, 5000), there=st.integers(1, 10**6))
def test_the_length_that_is_named_fits_and_the_next_one_does_not(
    per_token: int, fixed: int, there: int
) -> None:
    def bytes_of(length: int) -> int:
        return fixed + per_token * length

    def check(length: int) -> None:
        check_kv_memory(bytes_of, length, limit_gib=there / GIB, device=CPU)

    _, fits = refusal(lambda: check(there + 1))
    assert bytes_of(fits) <= there or fits == 0
    assert bytes_of(fits + 1) > there
    if fits:
        check(fits)


def test_the_message_names_what_is_needed_what_is_there_and_what_to_do() -> None:
    message, _ = refusal(lambda: check_kv_memory(lambda n: n * GIB, 7, limit_gib=2.5, device=CPU))
    assert message.startswith("the key/value caches of 7 tokens (the prompt and max_new_tokens)")
    assert "take 7 GiB and 2.5 GiB are allowed by decoding.kv_memory" in message
    assert "at most 2 tokens fit" in message
    message, _ = refusal(lambda: check_kv_memory(lambda n: n * GIB, 7, limit_gib=0.25, device=CPU))
    assert "not even one token fits" in message


def test_without_a_limit_the_device_s_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 3 * GIB)
    check_kv_memory(lambda n: n * GIB, 3, limit_gib=None, device=CPU)
    message, fits = refusal(
        lambda: check_kv_memory(lambda n: n * GIB, 4, limit_gib=None, device=CPU)
    )
    assert "3 GiB are free on cpu" in message
    assert fits == 3
    monkeypatch.setattr(memory, "free_memory", lambda _: None)  # nobody tells
    check_kv_memory(lambda n: n * GIB, 10**9, limit_gib=None, device=CPU)


def test_what_is_held_already_is_as_good_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: GIB)

    def check(length: int, held: float) -> None:
        per_token = GIB // 2
        check_kv_memory(
            lambda n: n * per_token, length, limit_gib=None, device=CPU, allocated=int(held * GIB)
        )

    check(2, held=0)
    check(5, held=1.5)
    check(9, held=4.5)
    message, fits = refusal(lambda: check(6, held=1.5))
    assert fits == 5
    assert "2.5 GiB are free" in message


def test_little_is_taken_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory, "free_memory")
    check_kv_memory(lambda n: n, memory.SMALL, limit_gib=None, device=CPU)
    with pytest.raises(NameError):
        check_kv_memory(lambda n: n, memory.SMALL + 1, limit_gib=None, device=CPU)


# --- what engines count and take -----------------------------------------------------------------


def drafting(limit: float | None = None, *, family: str = "llama", **options: Any) -> Any:
    target = tiny_target(family)
    torch.manual_seed(0)
    drafter = FalconDrafter(FalconConfig(**options), BuildContext(target)).eval()
    engine = speculative(target, drafter, chain(6))
    engine.decoding = DecodingConfig(kv_memory=limit)
    return engine


def counted(engine: Any, length: int) -> int:
    tree = engine.tree_builder
    own = engine.drafter.kv_bytes(length, tree)
    return int(engine.target.kv_bytes(length + tree.max_nodes) + own)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"query": "newest"}, {"phase": "absolute", "layers": 2}])
def test_a_generation_takes_exactly_what_was_counted(
    monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    engine = drafting(family=family, block=2, **options)
    caches = []
    made = engine.target.new_cache
    monkeypatch.setattr(
        engine.target, "new_cache", lambda capacity: caches.append(made(capacity)) or caches[0]
    )
    generate(engine, PROMPT, NEW)
    length = len(PROMPT) + NEW
    own = engine.drafter._drafting
    assert own.nbytes == engine.drafter.kv_bytes(length, engine.tree_builder) > 0
    assert caches[0].nbytes + own.nbytes == counted(engine, length)


def test_a_text_that_does_not_fit_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = counted(drafting(block=2), 50)
    engine = drafting(limit / GIB, block=2)
    monkeypatch.setattr(engine.target, "new_cache", None)
    monkeypatch.setattr(engine.target, "read", None)
    message, fits = refusal(lambda: generate(engine, PROMPT, NEW))
    assert "caches of 60 tokens" in message
    assert fits == 50


def test_the_length_that_would_fit_is_written() -> None:
    limit = counted(drafting(block=2), 50)
    assert len(generate(drafting(limit / GIB, block=2), PROMPT, 10).tokens) == 10


def test_plain_decoding_counts_the_target_alone() -> None:
    target = tiny_target()
    limit = DecodingConfig(kv_memory=target.kv_bytes(50) / GIB)
    _, fits = refusal(lambda: generate(PlainEngine(target, decoding=limit), PROMPT, NEW))
    assert fits == 50
    assert len(generate(PlainEngine(target, decoding=limit), PROMPT, 10).tokens) == 10


def test_a_prompt_beyond_the_context_is_refused_for_that() -> None:
    engine = drafting(1 / GIB, block=2)
    with pytest.raises(FalconLabError, match="300 tokens and the target reads at most 256"):
        generate(engine, [1] * 300, 5)
