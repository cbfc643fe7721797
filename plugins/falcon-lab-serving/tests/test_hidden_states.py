from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from falcon_lab_serving.__main__ import main
from states_stand_in import HIDDEN, LAYERS, MOST, RANK, Engine, HiddenStates, config, groups, vllm

from falcon_lab.data.state_files import Wanted, ask_for, file_of, read_states, write_states


@pytest.fixture
def writer() -> Iterator[Any]:
    """The connector's class."""
    with vllm():
        from falcon_lab_serving.hidden_states import HiddenStatesWriter

        yield HiddenStatesWriter


def test_every_text_gets_a_file_with_its_own_states(writer: Any, tmp_path: Path) -> None:
    engine = Engine(writer, tmp_path / "states")
    texts = {"a": ([5, 6, 7, 8, 9], [7, 2]), "b": ([5, 6, 7], [11])}
    for name, (tokens, blocks) in texts.items():
        keep, said = engine.finish(name, tokens, blocks, len(tokens))
        assert keep
        assert said == {"hidden_states_path": str(file_of(tmp_path / "states", tokens))}
    assert engine.step() == {"a", "b"}
    for tokens, blocks in texts.values():
        found = read_states(tmp_path / "states", tokens, LAYERS, HIDDEN)
        assert torch.equal(found, engine.states(blocks, len(tokens)))
    assert engine.step() is None


def test_a_text_that_was_given_up_is_not_written(writer: Any, tmp_path: Path) -> None:
    engine = Engine(writer, tmp_path)
    assert engine.finish("a", [5, 6, 7], [3], read=2) == (False, None)
    assert engine.step() is None
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_devices_writes(
    writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(writer, tmp_path)
    monkeypatch.setattr(RANK, "number", 1)
    engine.finish("a", [5, 6, 7], [3], read=3)
    assert engine.step() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "kinds", "said"),
    [
        ({"folder": None}, [HiddenStates()], "no folder"),
        ({"layers": []}, [HiddenStates()], f"the target has 0 to {MOST}"),
        ({"layers": [1, MOST + 1]}, [HiddenStates()], f"the target has 0 to {MOST}"),
        ({"layers": [1, 1]}, [HiddenStates()], "each once"),
        ({}, [object(), object()], "extract_hidden_states"),
    ],
)
def test_an_engine_without_the_states_is_refused(
    writer: Any, tmp_path: Path, given: dict[str, Any], kinds: list[object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        writer(config(**{"folder": tmp_path, **given}), "w", groups(*kinds))


class Reader:
    """In place of ``vllm.LLM``: writes a file a text, but for some."""

    def __init__(self, left: int = 0, refusal: Exception | None = None) -> None:
        self.left, self.refusal = left, refusal
        self.read: list[list[int]] = []

    def __call__(self, **given: Any) -> Reader:
        if self.refusal is not None:
            raise self.refusal
        self.given = given
        return self

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, **_: Any) -> None:
        texts = [prompt["prompt_token_ids"] for prompt in prompts]
        self.read += texts
        folder = Path(self.given["kv_transfer_config"]["kv_connector_extra_config"]["folder"])
        for text in texts[: len(texts) - self.left]:
            write_states(folder, text, torch.zeros(len(text), len(LAYERS), HIDDEN), LAYERS)


def extract(folder: Path, reader: Reader | None, *words: str) -> Any:
    more = {} if reader is None else {"LLM": reader, "SamplingParams": dict}
    with vllm(**more):
        return CliRunner().invoke(main, ["extract", str(folder), *words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of three texts that are wanted, of which one has been written."""
    texts = [[1, 2], [3], [4, 5, 6]]
    ask_for(tmp_path, Wanted("target", LAYERS), texts)
    write_states(tmp_path, texts[0], torch.zeros(2, len(LAYERS), HIDDEN), LAYERS)
    return tmp_path


def test_the_command_has_vllm_read_what_is_missing(folder: Path) -> None:
    reader = Reader()
    result = extract(folder, reader, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "2 files written, none is missing" in result.output
    assert reader.read == [[3], [4, 5, 6], [3]]
    assert reader.given["model"] == "target"
    assert reader.given["dtype"] == "float32"
    assert json.dumps(LAYERS) in json.dumps(reader.given["speculative_config"])
    assert "0 files written" in extract(folder, None).output


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (None, "vLLM cannot be imported"),
        (Reader(refusal=ValueError("no such\nmodel")), "vLLM refuses it: no such model"),
        (Reader(left=1), "has read 2 texts, and 1 have no file"),
    ],
)
def test_what_goes_wrong_is_one_line(folder: Path, reader: Reader | None, said: str) -> None:
    result = extract(folder, reader)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.splitlines()) == 1


def test_a_folder_that_wants_nothing_is_refused(tmp_path: Path) -> None:
    result = extract(tmp_path / "other", None)
    assert result.exit_code == 2
    assert "does not say whose states" in result.output
