"""A GGUF file as a Hugging Face folder, converted once and kept in the cache.

transformers reads a GGUF file by undoing its quantisation, slowly; the folder has the weights as
numbers, the configuration, the tokenizer and the chat template, and is a model like any other.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from falcon_lab.bars import Bar
from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.files import about, cached, make_folder, make_once, write_atomically
from falcon_lab.model.checkpoint import lacking
from falcon_lab.model.gguf_header import GGUFHeader, TensorEntry, cut_off, read_header
from falcon_lab.model.memory import check_room, gib
from falcon_lab.stored import read_json

T = TypeVar("T")

PACKAGES = ("gguf", "accelerate")
"""What transformers reads GGUF files with."""
OLDEST = (5, 20)
"""The first version of transformers whose tokenizers from GGUF files are those of the models."""
MANIFEST = "conversion.json"
"""The file that is written last."""
FORMAT = 1
"""Number of the way in which files are converted."""
CHUNK = 2**24
"""Bytes that are read at once."""


@dataclass(frozen=True)
class Manifest:
    """What a whole folder has: the format of the conversion, and the size of every file."""

    format: int
    sizes: dict[str, int]


def converted(path: Path, announce: Callable[[str], None], check: Callable[[Any], None]) -> Path:
    """Return the Hugging Face folder of a GGUF file; it is made the first time.

    Its name has the fingerprint of the file's content, so another file of that name is another
    folder.

    Args:
        path: of the file.
        announce: is called with one line for the user.
        check: is given the model's configuration before its weights are read, and raises where they
            are of no use.

    Raises:
        FalconLabError: the file is missing, cut off or no model that transformers reads, a package
            is missing, or the cache has no room.
    """
    folder = cached("targets", path.stem, content_fingerprint(path))

    def make(partial: Path) -> None:
        header = readable_header(path)
        what = f"{header.elements / 1e6:.0f} M weights, {_dtype(header)}"
        announce(f"{path}: converting it once ({what}), kept in {folder}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _convert(header, make_folder(partial), check)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    make_once(folder, make, is_finished=_is_whole)
    return folder


def content_fingerprint(path: Path) -> str:
    """Return twelve hex digits of a file's content.

    Raises:
        FalconLabError: it cannot be read.
    """
    digest = hashlib.sha256()
    with about(path, "read"), path.open("rb") as file:
        size = path.stat().st_size
        with Bar(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True) as bar:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                bar.update(len(chunk))
    return digest.hexdigest()[:12]


def readable_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file whose tensors and tokenizer can be read.

    Raises:
        FalconLabError: they cannot, or what reads them is not installed.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise FalconLabError(
            f"{path}: reading GGUF files needs {' and '.join(missing)}, which is not installed; "
            f"pip install {' '.join(missing)}"
        )
    if tuple(map(int, version("transformers").split(".")[:2])) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise FalconLabError(
            f"{path}: reading GGUF files needs transformers {least} or later, and "
            f"{version('transformers')} is installed; pip install 'transformers>={least}'"
        )
    header = read_header(path)
    whole = header.start + max(tensor.offset + _bytes(tensor, path) for tensor in header.tensors)
    if whole > header.size:
        raise cut_off(path, header.size, whole)
    if (
        not header.values.get("tokenizer.ggml.tokens")
        or "tokenizer.ggml.model" not in header.values
    ):
        raise FalconLabError(
            f"{path}: has no tokenizer; convert the model again with its tokenizer beside it, or "
            "name its Hugging Face folder"
        )
    return header


def _bytes(tensor: TensorEntry, path: Path) -> int:
    """Return the size of a tensor's data.

    Raises:
        FalconLabError: they are of a type that cannot be read.
    """
    import numpy
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    name = f"number {tensor.kind}"
    try:
        kind = GGMLQuantizationType(tensor.kind)
        name = kind.name
        elements, size = GGML_QUANT_SIZES[kind]
        dequantize(numpy.zeros((1, size), numpy.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise FalconLabError(
            f"{path}: tensor {tensor.name!r} is of type {name}, which the installed gguf cannot "
            "read; take a file of another quantisation, such as Q4_1, Q8_0 or F16"
        ) from error
    return -(-tensor.elements // elements) * int(size)


def _dtype(header: GGUFHeader) -> str:
    """Return what the weights are kept in: the half type of a file that has no other, or float32.

    A quantised weight is a product of numbers of its block, which no half type holds.
    """
    from gguf import GGMLQuantizationType as Kind

    kinds = {tensor.kind for tensor in header.tensors} - {Kind.F32}
    halves = {Kind.F16: "float16", Kind.BF16: "bfloat16"}
    return next((name for kind, name in halves.items() if kinds == {kind}), "float32")


def _convert(header: GGUFHeader, folder: Path, check: Callable[[Any], None]) -> None:
    """Write configuration, tokenizer and weights, and the manifest last."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, _dtype(header))
    _check_room(folder, header.elements * dtype.itemsize)
    with TemporaryDirectory(dir=folder) as place:
        # What lies beside the file may belong to another model.
        (Path(place) / "model.gguf").symlink_to(header.path.absolute())
        given: dict[str, Any] = {"gguf_file": "model.gguf", "trust_remote_code": False}
        config = _read(header, lambda: AutoConfig.from_pretrained(place, **given))
        check(config)
        plain = _read(header, lambda: _without_weights(config, header))
        tokenizer = _read(header, lambda: AutoTokenizer.from_pretrained(place, **given))
        model, report = _read(
            header,
            lambda: AutoModelForCausalLM.from_pretrained(
                place, config=config, dtype=dtype, output_loading_info=True, **_unpacked(), **given
            ),
        )
        if missing := lacking(report):
            raise FalconLabError(f"{header.path}: lacks weights: {missing}")
        # transformers saves no model that it has from a GGUF file, but one of its own with the
        # same weights.
        _read(header, lambda: plain.load_state_dict(model.state_dict(), assign=True))
        plain.tie_weights()
        plain.generation_config = model.generation_config
    with about(folder, also=(Exception,)):  # nothing here is our own code
        tokenizer.save_pretrained(folder)
        plain.save_pretrained(folder)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    write_atomically(folder / MANIFEST, json.dumps(asdict(Manifest(FORMAT, sizes))))


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FalconLabError(
            f"{folder.parent}: {gib(needed)} are needed and {gib(free)} are free; make room, or "
            "set FALCON_LAB_CACHE to another folder"
        )


def _read(header: GGUFHeader, read: Callable[[], T]) -> T:
    """Return what a call of transformers reads.

    Raises:
        FalconLabError: with what it says.
    """
    try:
        return read()
    except FalconLabError:
        raise
    except Exception as error:  # whatever it meets in a stranger's file
        from transformers import __version__

        raise FalconLabError(
            f"{header.path}: transformers {__version__} cannot read this model of architecture "
            f"{header.architecture!r} ({type(error).__name__}: {one_line(error)[:300]})"
        ) from error


def _without_weights(config: Any, header: GGUFHeader) -> Any:
    """Return a model of a configuration that has shapes and no numbers.

    Raises:
        FalconLabError: it would have far more weights than the file, or does not fit here.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    weights = sum(weight.numel() for weight in model.parameters())
    if weights > 2 * header.elements:  # once more where the LM head is the embeddings
        raise FalconLabError(
            f"{header.path}: is damaged: it speaks of {weights} weights and has {header.elements}; "
            "fetch it again"
        )
    what = f"{header.path} while it is converted"
    check_room(config.get_text_config(decoder=True), lambda: model, what)
    return model


def _unpacked() -> dict[str, Any]:
    """Return the arguments by which transformers undoes the quantisation; older ones do always."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has every file of a conversion, in its size."""
    try:
        manifest = read_json(folder / MANIFEST, Manifest, "conversion", "convert the file again")
        sizes = {name: (folder / name).stat().st_size for name in manifest.sizes}
    except (FalconLabError, OSError):
        return False
    return manifest == Manifest(FORMAT, sizes)
