"""Medusa's heads as others train and publish them.

vLLM's names are ``blocks.i.layers.j`` and ``lm_heads.i``; the authors' are ``i.j.linear`` and
``i.n`` for n residual layers, behind ``medusa_head.`` or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.export.mapping import IDS, check_sizes, plain_tables, same_rows
from falcon_lab.interfaces import ImportFormat, StrangersFolder, TrainedDrafter

PREFIX = re.compile(r"(?:medusa_heads?\.)?(.*)")
BLOCK = re.compile(
    r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|(\d+)\.(\d+)\.linear\.(weight|bias)"
)
HEAD = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.\d+\.weight")
MAP = "token_map"
SHARED = "lm_head.weight"


class Part(NamedTuple):
    """A tensor of a head: of a residual layer, or (without a layer) its output layer."""

    name: str
    head: int
    layer: int | None
    what: str


def parts_of(folder: StrangersFolder) -> Iterator[Part]:
    """Yield the tensors that are known."""
    for name in folder.tensors:
        inner = PREFIX.fullmatch(name)
        bare = name if inner is None else inner[1]
        if found := BLOCK.fullmatch(bare):
            head, layer, what = (each for each in found.groups() if each is not None)
            yield Part(name, int(head), int(layer), what)
        elif found := HEAD.fullmatch(bare):
            yield Part(name, int(found[1] or found[2]), None, "weight")


class MedusaFolder(ImportFormat):
    """Medusa, whoever has trained it."""

    programs = "vLLM and Medusa's authors"

    def recognises(self, folder: StrangersFolder) -> bool:
        """Return whether some tensor is a head's residual layer."""
        return any(part.layer is not None for part in parts_of(folder))

    def options(self, folder: StrangersFolder, host: Any) -> dict[str, Any]:
        """Return the number of heads and of their layers, and whose the output layers are."""
        check_sizes(folder, host)
        folder.expect("logit_scale", 1, what="Medusa")
        parts = list(parts_of(folder))
        heads = 1 + max(part.head for part in parts)
        layers = 1 + max(part.layer for part in parts if part.layer is not None)
        own = [part for part in parts if part.layer is None]
        ids = _words(folder, host.vocab_size)
        shared = len(own) <= 1 < heads or folder.config.get("original_lm_head") is True or not own
        names = [part.name for part in own if shared]
        _check_shared(folder, [*names, *({SHARED} & set(folder.tensors))], ids, host)
        return {
            "block": heads,
            "layers": layers,
            "head": "shared" if shared else "own",
            "draft_vocabulary": None if ids is None else len(ids),
        }

    def read(self, folder: StrangersFolder, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map names; heads without a bias get one of zeros."""
        ours: dict[str, Tensor] = {}
        words = _words(folder, drafter.host.vocab_size)
        folder.tensors.pop(MAP, None)
        order = None if words is None else words.argsort()
        if words is not None and order is not None:
            ours[IDS] = words[order]
        for part in list(parts_of(folder)):
            found = folder.take(part.name)
            if part.layer is not None:
                ours[f"trunks.{part.head}.{part.layer}.linear.{part.what}"] = found
            elif drafter.config.head == "own":
                ours[f"heads.{part.head}.linear.weight"] = _columns(found, words, order)
        folder.tensors.pop(SHARED, None)  # compared by ``options``
        for name in [each for each in ours if each.endswith(".weight") and each.startswith("t")]:
            bias = name.replace(".weight", ".bias")
            ours.setdefault(bias, torch.zeros_like(ours[name][:, 0]))
        return ours


def _columns(rows: Tensor, words: Tensor | None, order: Tensor | None) -> Tensor:
    """Return the rows of an LM head in the order of a draft vocabulary."""
    if words is None or order is None:
        return rows
    return rows[order] if len(rows) == len(words) else rows[words[order]]


def _words(folder: StrangersFolder, vocabulary: int) -> Tensor | None:
    """Return the tokens that are drafted, in the folder's order; None: all."""
    found = folder.tensors.get(MAP)
    if found is None:
        return None
    if not bool(((found >= 0) & (found < vocabulary)).all()) or len({*found.tolist()}) != len(
        found
    ):
        raise FalconLabError(f"its {MAP} does not name tokens of the target, each once")
    return None if len(found) == vocabulary else found.long()


def _check_shared(folder: StrangersFolder, names: list[str], ids: Tensor | None, host: Any) -> None:
    """See that the one output layer of all heads is the target's LM head.

    Raises:
        FalconLabError: it is another.
    """
    rows = plain_tables(host).head
    for name in names:
        found = folder.tensors[name]
        expected = rows if ids is None or len(found) == len(rows) else rows[ids]
        if not same_rows(found, expected):
            raise FalconLabError(
                f"its heads share {name}, which is not the target's LM head; name the target that "
                "it was trained for by --target"
            )
