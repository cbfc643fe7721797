from __future__ import annotations

import importlib
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from falcon_lab_serving.names import DRAFTER, TREE, tree_node
from falcon_lab_serving.sglang import NAME, NODES, check_arguments, register
from serving_cases import HEAD, KNOWN, target
from sglang_stand_in import CustomSpecAlgo, Scheduler, sglang

from falcon_lab import testing
from falcon_lab.decoding.assembling import assemble
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.drafters.saved import load_drafter
from falcon_lab.errors import FalconLabError

HERE = Path(__file__).parent


@pytest.fixture
def algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CustomSpecAlgo]:
    """What is registered, with a saved drafter to serve."""
    testing.save_for_export(tmp_path / "drafter", target(), HEAD, KNOWN)
    monkeypatch.setenv(DRAFTER, str(tmp_path / "drafter"))
    with sglang() as registered:
        register()
        yield registered[NAME]


def tables() -> tuple[Any, Any]:
    model = target().model
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def test_the_entry_point_registers_an_algorithm_that_the_scheduler_takes_for_ngram(
    algorithm: CustomSpecAlgo,
) -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    [place] = project["entry-points"]["sglang.srt.plugins"].values()
    module, _, name = place.partition(":")
    assert getattr(importlib.import_module(module), name) is register
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    assert not algorithm.is_eagle()
    assert algorithm.create_future_map("cpu", None) == "NGRAM's"  # type: ignore[attr-defined]


@pytest.mark.parametrize("tree", [None, '{"name": "chain", "depth": 3}'])
def test_served_texts_are_the_target_s(
    algorithm: CustomSpecAlgo, monkeypatch: pytest.MonkeyPatch, tree: str | None
) -> None:
    if tree is not None:
        monkeypatch.setenv(TREE, tree)
    scheduler = Scheduler(algorithm, tables())
    scheduler.admit("a", [1, 2, 3, 4, 5], chunk=2)
    scheduler.decode()
    scheduler.admit("b", [7, 3, 7], chunk=9)
    for _ in range(5):
        scheduler.decode()
    for request in scheduler.running:
        count = len(request.output_ids)
        plain = testing.write(PlainEngine(target()), request.origin_input_ids_unpadded, count)
        assert request.output_ids == plain.tokens
    scheduler.worker.clear_cache_pool()


def test_a_server_makes_as_many_rounds_as_our_engine(algorithm: CustomSpecAlgo) -> None:
    scheduler = Scheduler(algorithm, tables())
    request = scheduler.admit("a", [1, 2, 3], chunk=9)
    while len(request.output_ids) < 1 + 1.2 * scheduler.rounds or scheduler.rounds < 4:
        scheduler.decode()
    drafter = load_drafter(os.environ[DRAFTER], target(), KNOWN)
    parts = {
        "tree": tree_node(6),
        "acceptance": {"name": "greedy"},
        "controller": {"name": "fixed"},
    }
    engine = assemble(target(), drafter, parts, KNOWN)
    ours = testing.write(engine, [1, 2, 3], len(request.output_ids))
    assert ours.tokens == request.output_ids
    assert len(ours.rounds) == scheduler.rounds


def test_a_drafter_of_another_target_is_refused(algorithm: CustomSpecAlgo) -> None:
    target_of_others = testing.tiny_target("llama", vocab=16, layers=2)
    embeddings = target_of_others.model.get_input_embeddings().weight
    scheduler = Scheduler(algorithm, tables())
    runner = scheduler.worker.model_runner
    runner.model_config.hf_config = target_of_others.model.config
    runner.model.get_embed_and_head = lambda: (embeddings, embeddings)
    with pytest.raises(FalconLabError, match="whose vocab_size is 12; tiny has 16"):
        scheduler.worker.alloc_memory_pool()


def arguments(**changed: Any) -> Any:
    right = {
        "enable_return_hidden_states": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "speculative_num_draft_tokens": None,
        "max_running_requests": None,
    }
    return SimpleNamespace(**(right | changed))


@pytest.mark.parametrize(
    ("changed", "variables", "said"),
    [
        ({"enable_return_hidden_states": False}, {}, "--enable-return-hidden-states"),
        ({"disable_radix_cache": False}, {}, "--disable-radix-cache"),
        ({"disable_overlap_schedule": False}, {}, "--disable-overlap-schedule"),
        ({"tp_size": 2}, {}, "tp_size is 2"),
        ({}, {DRAFTER: ""}, DRAFTER),
        ({}, {TREE: "{"}, "no JSON"),
        ({}, {TREE: "[1]"}, "should be like"),
    ],
)
def test_a_server_that_cannot_serve_a_drafter_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    variables: dict[str, str],
    said: str,
) -> None:
    for name, value in ({DRAFTER: "somewhere"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        check_arguments(arguments(**changed))


def test_what_was_left_open_is_filled_in(algorithm: CustomSpecAlgo) -> None:
    given = arguments()
    algorithm.validate_server_args(given)
    algorithm.handle_server_args(given)
    assert given.speculative_num_draft_tokens == NODES
    assert given.speculative_num_steps == NODES - 1
    given = arguments(speculative_num_draft_tokens=17, max_running_requests=4)
    algorithm.handle_server_args(given)
    assert (given.speculative_num_draft_tokens, given.max_running_requests) == (17, 4)
