"""Drafters that somebody else has trained, out of the folders that other programs write.

What such a folder holds is read whole or not at all: a tensor that nothing reads, or a setting that
no drafter of ours has, is an error that names it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.saved import DESCRIPTION
from falcon_lab.drafters.saved import check_state, describe, read_state, write_state
from falcon_lab.errors import FalconLabError
from falcon_lab.files import about
from falcon_lab.interfaces import BuildContext, ImportFormat, StrangersFolder, TrainedDrafter
from falcon_lab.report.page import render
from falcon_lab.stored import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

PICKLES = ("pytorch_model*.bin", "medusa_lm_head*.pt")
"""Files of weights from before safetensors; torch's restricted reader alone opens them."""
ADVICE = "name a folder of falcon-lab export, or a drafter's that another program wrote"
LAYER = "transformer_layer_config"
"""In a configuration of speculators: that of the decoder layers."""


def read_folder(path: Path, taps: list[int] | None = None) -> StrangersFolder:
    """Read what a folder holds.

    Args:
        path: of the folder.
        taps: layers of the target, where the user gives them.

    Raises:
        FalconLabError: it has no configuration or no weights, or they are damaged.
    """
    config = _configuration(path)
    inner = config.get(LAYER)
    if isinstance(inner, dict):
        config = {**inner, **{key: value for key, value in config.items() if value is not None}}
    return StrangersFolder(path, config, _read_weights(path), taps)


def _read_weights(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    files = files or sorted(each for pattern in PICKLES for each in path.glob(pattern))
    if not files:
        raise FalconLabError(
            f"{path}: has no weights ({', '.join(('*.safetensors', *PICKLES))}); copy it again"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = read_state(file) if file.suffix == ".safetensors" else _unpickled(file)
        if twice := sorted(set(tensors) & set(found)):
            raise FalconLabError(f"{file}: {twice[0]} is in another file of the folder, too")
        tensors |= found
    return tensors


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of torch's, which may hold nothing else."""
    import torch

    from falcon_lab.export.mapping import unpickled

    found = unpickled(file)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in found.items()
    ):
        raise FalconLabError(f"{file}: holds something else than tensors by name")
    return found


def target_of(path: Path) -> str | None:
    """Return the target that a folder of speculators names; None where none is named.

    Raises:
        FalconLabError: it has no ``config.json``, a damaged one, or that of a drafter saved here.
    """
    found: Any = _configuration(path).get("speculators_config")
    for key in ("verifier", "name_or_path"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def _configuration(path: Path) -> dict[str, Any]:
    with about(path, "read"):
        if not (path / DESCRIPTION).is_file():
            raise FalconLabError(f"{path}: has no {DESCRIPTION}; {ADVICE}")
    config = read_json(path / DESCRIPTION, dict[str, Any], "configuration of a drafter", ADVICE)
    if "falcon_lab" in config:
        raise FalconLabError(f"{path}: is a drafter that falcon-lab has saved already; {ADVICE}")
    return config


def import_strangers(
    path: Path, out: Path, target: Target, components: Components, taps: list[int] | None
) -> str:
    """Make a saved drafter of a folder that another program wrote.

    Args:
        path: of the folder.
        out: of the drafter.
        target: that it was trained for.
        components: know who reads such folders.
        taps: layers of the target that it reads; None: the folder says them.

    Returns:
        What was made, in a few words.

    Raises:
        FalconLabError: no drafter of ours computes what the folder does, with the one reason.
    """
    folder = read_folder(path, taps)
    name, form = _reader(folder, components)
    try:
        node = {"name": name, **form.options(folder, target)}
        node = components.check("drafter", node, "drafter")
        drafter = components.build("drafter", node, BuildContext(host=target))
        config = components.options("drafter", node)
        state = form.read(folder, TrainedDrafter(config, drafter, {}, target, target.name, 1))
        if folder.tensors:
            more = len(folder.tensors) - 1
            raise FalconLabError(
                f"holds {min(folder.tensors)}{f' and {more} more' if more else ''}, for which a "
                f"drafter {name} has no place"
            )
        check_state(state, drafter, path)
        drafter.load_state_dict(state)
    except FalconLabError as error:
        said = str(error)
        raise FalconLabError(said if said.startswith(str(path)) else f"{path}: {said}") from error
    provenance = components.provenance("drafter", node)
    description = describe(node, provenance, target)
    write_state(out, state, description, _card(path, form, description, state))
    layers = getattr(drafter, "taps", ())
    return f"{name}{f', which reads the layers {list(layers)}' if layers else ''}"


def _reader(folder: StrangersFolder, components: Components) -> tuple[str, ImportFormat]:
    known = dict(components.import_formats())
    found = {name: form for name, form in known.items() if form.recognises(folder)}
    if len(found) == 1:
        return next(iter(found.items()))
    if found:
        raise FalconLabError(f"{folder.path}: may be any of {', '.join(sorted(found))}")
    kinds = "; ".join(f"{name} ({form.programs})" for name, form in sorted(known.items()))
    architecture = next(iter(folder.config.get("architectures") or ["nothing"]), "nothing")
    raise FalconLabError(
        f"{folder.path}: is no drafter that is known here (its config.json says {architecture}, "
        f"its first tensor is {min(folder.tensors, default='missing')}); read are {kinds or 'none'}"
    )


def _card(
    path: Path, form: ImportFormat, description: dict[str, Any], state: dict[str, Tensor]
) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        weights = state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + weights.numpy().tobytes())
    return render(
        "imported.md",
        folder=path.resolve().name,
        programs=form.programs,
        drafter=description["drafter"],
        target=description["target"],
        provenance=description["provenance"],
        digest=digest.hexdigest()[:16],
    )
