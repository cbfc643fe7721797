"""The weight files of a model's folder: that they are there, whole, and nothing but tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.stored import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Index:
    """What is read of an index of weights."""

    weight_map: dict[str, str]


def check_weights(folder: Path) -> int:
    """Open every safetensors file of a model folder; return how many numbers they hold.

    Raises:
        FalconLabError: naming the file that is missing, cut short or corrupt.
    """
    from safetensors import SafetensorError, safe_open

    numbers = 0
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                numbers += sum(prod(file.get_slice(name).get_shape()) for name in names)
        except FileNotFoundError:
            raise FalconLabError(
                f"{path} is missing, and {folder.name}'s index names it; fetch it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise FalconLabError(
                f"{path} is cut short or corrupt ({one_line(error)}); fetch or save it again"
            ) from error
    return numbers


def lacking(report: Mapping[str, Any]) -> str:
    """Return the first weights that transformers did not find for a model; empty where it did."""
    missing = sorted(report["missing_keys"])
    return ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return [single]
    if not index.exists():
        pickled = " (pickled ones are not read)" if any(folder.glob("*.bin")) else ""
        raise FalconLabError(
            f"{folder} has no safetensors weights{pickled}; save the model there with "
            "save_pretrained"
        )
    advice = "fetch or save it again"
    names = set(read_json(index, Index, "index of weights", advice).weight_map.values())
    if outside := [name for name in names if name != Path(name).name or "\0" in name]:
        raise FalconLabError(
            f"{index}: no index of weights (it names {min(outside)!r:.80}, which is no file beside "
            f"it); {advice}"
        )
    return [folder / name for name in sorted(names)]
