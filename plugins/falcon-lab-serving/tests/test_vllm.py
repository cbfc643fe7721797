from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from falcon_lab_serving.names import DRAFTER
from falcon_lab_serving.vllm import FalconLabProposer
from serving_cases import HEAD, KNOWN, target
from vllm_stand_in import Runner, config, vllm

from falcon_lab import testing
from falcon_lab.decoding.assembling import assemble
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.drafters.saved import load_drafter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a saved drafter to serve."""
    testing.save_for_export(tmp_path / "drafter", target(), HEAD, KNOWN)
    monkeypatch.setenv(DRAFTER, str(tmp_path / "drafter"))
    loader = transformers.AutoTokenizer
    monkeypatch.setattr(loader, "from_pretrained", lambda name: target().tokenizer)
    with vllm():
        yield tmp_path / "drafter"


def test_rounds_are_those_of_our_chain(folder: Path) -> None:
    runner = Runner(FalconLabProposer(config()), chunk=50)
    request = runner.admit([1, 2, 3])
    new = 30
    while len(request.text) < 3 + new:
        runner.step()
    parts = {"acceptance": {"name": "greedy"}, "controller": {"name": "fixed"}}
    chain = {"tree": {"name": "chain", "depth": 4}}
    engine = assemble(target(), load_drafter(folder, target(), KNOWN), parts | chain, KNOWN)
    ours = testing.write(engine, [1, 2, 3], len(request.text) - 3)
    assert request.text[3:] == ours.tokens
    assert len(ours.rounds) == runner.rounds < new


def test_requests_keep_apart_whatever_their_places(folder: Path) -> None:
    runner = Runner(FalconLabProposer(config()), chunk=5)
    requests = [runner.admit([1, 2, 3, 4, 5, 6, 7, 8])]
    runner.step()
    requests.append(runner.admit([1, 2, 3, 4, 5, 6, 7, 9]))
    for _ in range(6):
        runner.step()
    runner.batch.remove(requests[0])
    requests.append(runner.admit([1, 2, 3]))
    for _ in range(4):
        runner.step()
    for request in requests:
        written = request.text[len(request.prompt) :]
        assert len(written) > 3
        assert written == testing.write(PlainEngine(target()), request.prompt, len(written)).tokens


@pytest.mark.parametrize(
    ("changed", "drafter", "said"),
    [
        ({"enforce_eager": False}, "there", "--enforce-eager"),
        ({"enable_prefix_caching": True}, "there", "--no-enable-prefix-caching"),
        ({"tensor_parallel_size": 2}, "there", "one device"),
        ({}, "", DRAFTER),
    ],
)
def test_an_engine_that_hides_features_is_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], drafter: str, said: str
) -> None:
    monkeypatch.setenv(DRAFTER, drafter)
    with pytest.raises(ValueError, match=said):
        FalconLabProposer(config(**changed))
