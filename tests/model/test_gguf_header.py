"""The header of a GGUF file is held against the file's own length before anything is believed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.model.gguf_header import is_gguf, read_header
from gguf_files import write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "Q4_0")
    return path.read_bytes()


def test_a_header_has_the_values_and_the_tensors(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header = read_header(path)
    assert header.architecture == "llama"
    assert header.values["llama.block_count"] == 2
    assert header.values["tokenizer.ggml.tokens"] == 280
    assert {tensor.name: tensor.shape for tensor in header.tensors}["token_embd.weight"] == (
        128,
        280,
    )
    assert len(header.tensors) == 21
    assert header.size == len(whole)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.0001, 0.005, 0.02])
def test_a_file_that_ends_in_its_header_is_refused(
    whole: bytes, tmp_path: Path, share: float
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(FalconLabError, match="fetch it again"):
        read_header(path)


def test_whatever_bytes_are_changed_it_is_read_or_refused_and_nothing_else(
    whole: bytes, tmp_path: Path
) -> None:
    draw, path, refused = random.Random(0), tmp_path / "model.gguf", 0
    for _ in range(300):
        content = bytearray(whole[:16384])
        for _ in range(draw.choice([1, 1, 4])):
            content[draw.randrange(4, 6000)] = draw.choice([0, 1, 9, 127, 255])
        path.write_bytes(content)
        try:
            read_header(path)
        except FalconLabError:  # and nothing else
            refused += 1
    assert refused > 30


def test_a_file_is_known_by_its_suffix_or_its_first_bytes(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(whole[:4])
    (tmp_path / "text").write_text("GG")
    (tmp_path / "folder.gguf").mkdir()
    names = ("blob", "text", "nowhere.GGUF", "nowhere", "folder.gguf")
    found = [is_gguf(str(tmp_path / name)) for name in names]
    assert found == [True, False, True, False, False]
    assert not is_gguf("org/model")
    for name in ("a\0b", "a" * 5000):
        with pytest.raises(FalconLabError):
            is_gguf(name)
