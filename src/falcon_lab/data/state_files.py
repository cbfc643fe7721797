"""Hidden states of texts as files, which a server writes and a training reads.

A file is a text: its tokens, the states of some layers behind each of them, and which layers these
are. Layer i is what decoder layer i puts out, counted from 1, and 0 what the first one reads; the
last one's states are before the final norm. Its tokens decide a file's name, so that a text is
found without a list of all. What is still to be written stands beside them in ``WANTED``.

Shapes: T tokens of a text, L layers, H hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, read_lines, write_atomically, write_whole
from falcon_lab.stored import fitting

STATES, TOKENS, LAYERS = "hidden_states", "token_ids", "layers"
"""Tensors of a file, ``[T, L, H]`` and ``[T]``, and the key of its metadata with the layers."""
WANTED = "wanted.jsonl"
"""File of what is still to be written: target and layers in its first line, then a text a line."""
AGAIN = "delete it, and have the server write it again"


def file_of(folder: Path, tokens: Sequence[int]) -> Path:
    """Return the place of a text's file."""
    name = hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()
    return folder / f"{name[:32]}.safetensors"


def write_states(
    folder: Path, tokens: Sequence[int], states: Tensor, layers: Sequence[int]
) -> Path:
    """Write the states ``[T, L, H]`` of a text, whole or not at all.

    Raises:
        FalconLabError: the file cannot be written.
    """
    tensors = {STATES: states.cpu().contiguous(), TOKENS: torch.tensor(tokens)}
    metadata = {LAYERS: json.dumps(list(layers))}
    return write_whole(
        file_of(folder, tokens),
        lambda temporary: save_file(tensors, temporary, metadata),
        also=(SafetensorError,),
    )


def read_states(folder: Path, tokens: Sequence[int], layers: Sequence[int], hidden: int) -> Tensor:
    """Read the states ``[T, L, H]`` of some layers of a text.

    Args:
        folder: of the files.
        tokens: of the text.
        layers: in any order.
        hidden: H of the target.

    Raises:
        FalconLabError: there is no file of the text; or it is damaged, or of another model, or
            lacks a layer.
    """
    path = file_of(folder, tokens)
    with _opened(path) as file:
        if not {STATES, TOKENS} <= (names := set(file.keys())):
            raise FalconLabError(
                f"{path}: holds no hidden states ({', '.join(sorted(names)):.80}); {AGAIN}"
            )
        states, there = file.get_tensor(STATES), _layers(path, file.metadata() or {})
        if file.get_tensor(TOKENS).tolist() != list(tokens):
            raise FalconLabError(f"{path}: holds the states of another text; {AGAIN}")
    expected = (len(tokens), len(there), hidden)
    if states.shape != expected:
        raise FalconLabError(
            f"{path}: has states of the shape {list(states.shape)}, and {list(expected)} is that "
            "of the target; the server ran another model"
        )
    if missing := sorted(set(layers) - set(there)):
        raise FalconLabError(
            f"{path}: has the states of layers {there}, and those of {missing} are wanted too; "
            "set data.extracted_states to another folder, and have the server write them all"
        )
    if not states.isfinite().all():
        raise FalconLabError(
            f"{path}: has numbers that are not finite; have the server write it again in float32 "
            "or bfloat16"
        )
    return states[:, [there.index(layer) for layer in layers]]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with about(path, "read"), safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise FalconLabError(f"{path}: is damaged ({error}); {AGAIN}") from error


def _layers(path: Path, metadata: dict[str, str]) -> list[int]:
    try:
        layers = fitting(json.loads(metadata.get(LAYERS, "")), list[int])
    except ValueError:
        layers = None
    if layers is None:
        raise FalconLabError(
            f"{path}: does not say which layers it has; have falcon_lab_serving write it again"
        )
    return layers


@dataclass(frozen=True)
class Wanted:
    """What a server is to write.

    Attributes:
        target: hub id or folder of the model whose states are wanted.
        layers: of which layers.
    """

    target: str
    layers: list[int]


@dataclass(frozen=True)
class Text:
    """A text in the file of what is wanted."""

    tokens: list[int]


def ask_for(folder: Path, wanted: Wanted, texts: Sequence[Sequence[int]]) -> None:
    """Write down what a server is to write, in place of what was asked for before.

    Raises:
        FalconLabError: it cannot be written.
    """
    lines = [asdict(wanted), *({"tokens": list(text)} for text in texts)]
    write_atomically(folder / WANTED, "".join(json.dumps(line) + "\n" for line in lines))


def asked_for(folder: Path) -> tuple[Wanted, list[list[int]]]:
    """Return what a server is to write, and the texts whose files are not there yet.

    Raises:
        FalconLabError: nothing was asked for, or a line is damaged.
    """
    path = folder / WANTED
    advice = f"a run with data.extracted_states={folder} writes it"
    lines = read_lines(path)
    wanted = fitting(next(lines, None), Wanted)
    if wanted is None:
        raise FalconLabError(f"{path}: does not say whose states are wanted; {advice}")
    texts = []
    for number, line in enumerate(lines, 2):
        text = fitting(line, Text)
        if text is None:
            raise FalconLabError(f"{path}: line {number} holds no tokens; {advice}")
        texts.append(text.tokens)
    return wanted, [text for text in texts if not file_of(folder, text).exists()]
