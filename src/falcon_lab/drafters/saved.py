"""Save and load a drafter: ``config.json``, ``model.safetensors`` and ``README.md`` in a folder.

Nothing is ever unpickled. A folder is written beside its place and renamed, so that what was
there stays whole until the new one is. Reading never writes: what a killed exchange left is read
where it lies, and the next writer finishes it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from falcon_lab import __version__
from falcon_lab.config.saved import (
    DESCRIPTION,
    FORMAT,
    UNFINISHED,
    opened_drafter,
    read_description,
)
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.files import about, keep_former, make_folder
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.builtins import SavedConfig
from falcon_lab.stored import read_bounded

if TYPE_CHECKING:
    from torch import Tensor, nn

    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

CONFIG, WEIGHTS, CARD = DESCRIPTION, "model.safetensors", "README.md"
AS_TRAINED = "auto"
"""The precision in which a drafter is saved, unless another is asked for."""


def save_drafter(
    folder: Path | str,
    drafter: nn.Module,
    *,
    node: Mapping[str, Any],
    provenance: Mapping[str, Any],
    target: Target,
    card: str,
    dtype: str = AS_TRAINED,
) -> Path:
    """Write a drafter, replacing one that may be there.

    Args:
        folder: where to.
        drafter: its weights are saved; the target's are not among them.
        node: the component's YAML node, from which it can be built again.
        provenance: name, distribution and version of the component.
        target: what it was trained for.
        card: the model card, Markdown.
        dtype: of the saved weights.

    Raises:
        FalconLabError: it cannot be written; what was there is still there.
    """
    state = {name: weights.detach().cpu() for name, weights in drafter.state_dict().items()}
    return _write(Path(folder), state, _describe(node, provenance, target), card, dtype)


def save_as(folder: Path, dtype: str) -> bool:
    """Write a saved drafter's weights in another precision; return whether that was to be done.

    Args:
        folder: as ``save_drafter`` wrote it.
        dtype: "auto" leaves them as they are.

    Raises:
        FalconLabError: a file of it is damaged, or it cannot be written.
    """
    there = _whole(folder)
    config, state = read_config(folder), _read_state(there / WEIGHTS)
    wanted = {name: _stored(weights, dtype).dtype for name, weights in state.items()}
    if all(weights.dtype == wanted[name] for name, weights in state.items()):
        return False
    _write(folder, state, config, read_bounded(there / CARD).decode(errors="replace"), dtype)
    return True


def _stored(weights: Tensor, dtype: str) -> Tensor:
    """Return weights in the precision in which they are saved; whole numbers stay what they are."""
    import torch

    if dtype == AS_TRAINED or not weights.is_floating_point():
        return weights
    return weights.to(getattr(torch, dtype))


def _write(
    folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], card: str, dtype: str
) -> Path:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    finish_exchange(folder)
    fresh = _removed(folder.with_name(f".{folder.name}.new"))
    saved = {name: _stored(weights, dtype).contiguous() for name, weights in state.items()}
    try:
        make_folder(fresh)
        with about(folder, also=(SafetensorError,)):
            (fresh / UNFINISHED).touch()
            save_file(saved, fresh / WEIGHTS, metadata={"format": "pt"})
            (fresh / CARD).write_text(card, "utf-8")
            (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
            _exchange(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        finish_exchange(folder)
        raise
    return folder


def load_drafter(
    folder: Path | str, target: Target, components: Components, *, force: bool = False
) -> Any:
    """Load a drafter in evaluation mode, on the target's device and in its precision.

    Args:
        folder: as ``save_drafter`` wrote it.
        target: what it is to draft for.
        components: knows the drafter's kind.
        force: load it onto a target that it was not trained for.

    Raises:
        FalconLabError: a file is missing or damaged, the drafter's plug-in is not installed, it
            was trained for another target, or its draft vocabulary is of another vocabulary.
    """
    folder = _whole(Path(folder))
    config = read_config(folder)
    trained_for = config["target"]
    if trained_for["fingerprint"] != target.fingerprint and not force:
        raise FalconLabError(
            f"{folder}: this drafter was trained for {trained_for['name']} with fingerprint "
            f"{trained_for['fingerprint']}; {target.name} has {target.fingerprint}. Load that "
            "target, or distil a drafter for this one"
        )
    node = saved_node(folder, components)
    drafter = components.build("drafter", node, BuildContext(host=target))
    if not hasattr(drafter, "load_state_dict"):
        owner = components.owner("drafter", node["name"])
        raise FalconLabError(
            f"{folder}: drafter {node['name']!r} of {owner} has no weights to load"
        )
    known = trained_for.get("vocab_size")
    if drafter.vocabulary is not None and known not in (None, target.vocab_size):
        raise FalconLabError(
            f"{folder}: its draft vocabulary is some of the {known} tokens of "
            f"{trained_for['name']}, and {target.name} has {target.vocab_size}; distil a drafter "
            "for this target"
        )
    _read_weights(folder / WEIGHTS, drafter)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def saved_drafter(config: SavedConfig, context: BuildContext) -> Any:
    """Return a drafter that was saved, as a part of another component.

    Raises:
        FalconLabError: as ``load_drafter``; or it is a run's own, and there is no run.
    """
    drafter: Any
    if context.saved is not None:
        drafter = context.saved(config.path)
    elif config.path is None:
        raise FalconLabError(
            "drafter 'saved' without a path is the run's own, and there is no run here; give its "
            "folder: {name: saved, path: RUN/drafter}"
        )
    else:
        target, components = cast("Target", context.host), cast("Components", context.components)
        with opened_drafter(config.path, components) as folder:
            drafter = load_drafter(folder, target, components)
    drafter.pretrained = True
    return drafter


def refuse_other_target(folder: Path, stand_in: Target) -> None:
    """Refuse a saved drafter that cannot be for a target, of which a stand-in is there.

    Raises:
        FalconLabError: its weights are missing, or it was trained for a target of another shape.
    """
    folder = _whole(folder)
    trained_for = read_config(folder)["target"]
    if not (folder / WEIGHTS).is_file():
        raise FalconLabError(f"{folder / WEIGHTS} is missing; save the drafter again")
    if trained_for.get("hidden_size") not in (None, stand_in.hidden_size):
        raise FalconLabError(
            f"{folder}: this drafter was trained for {trained_for.get('name')} with a hidden size "
            f"of {trained_for.get('hidden_size')}; {stand_in.name} has {stand_in.hidden_size}"
        )


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read a saved drafter's ``config.json``: node, provenance and the target it was trained for.

    Raises:
        FalconLabError: it is missing or is not one of ours.
    """
    return read_description(_whole(Path(folder)))


def saved_node(folder: Path | str, components: Components) -> dict[str, Any]:
    """Return the node of a saved drafter, by the name that its component has in a registry.

    Raises:
        FalconLabError: as ``read_config``; or another plug-in has the name of its component.
    """
    config = read_config(folder)
    try:
        return components.recorded("drafter", config["drafter"], config["provenance"])
    except ConfigError as error:
        raise error.at(str(Path(folder) / CONFIG)) from None


def _describe(
    node: Mapping[str, Any], provenance: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "falcon_lab": __version__,
        "drafter": dict(node),
        "provenance": dict(provenance),
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        },
    }


# --- weights ------------------------------------------------------------------------------------


def _read_state(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with about(path, "read"):
        if not path.exists():
            raise FalconLabError(f"{path} is missing; save the drafter again")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise FalconLabError(
            f"{path} is damaged or cut short ({error}); copy it again, or save the drafter again"
        ) from error


def _read_weights(path: Path, drafter: nn.Module) -> None:
    state = _read_state(path)
    if reason := _misfit(state, drafter.state_dict()):
        raise FalconLabError(
            f"{path} does not fit its {CONFIG}: {reason}; copy both again, or save it again"
        )
    try:
        drafter.load_state_dict(state)
    except FalconLabError as error:
        raise FalconLabError(f"{path}: {error}") from None


def _misfit(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return the first thing that is wrong with weights; empty where they fit."""
    for name, place in expected.items():
        if name not in state:
            return f"{name} is missing"
        found = state[name]
        if found.shape != place.shape:
            return f"{name} is {list(found.shape)}, not {list(place.shape)}"
        if found.is_floating_point() != place.is_floating_point():
            return f"{name} is of {found.dtype}, not of {place.dtype}"
        if not bool(found.isfinite().all()):
            return f"{name} holds numbers that are not finite"
    return next((f"{name} is one too many" for name in state if name not in expected), "")


# --- exchanging folders -------------------------------------------------------------------------


def _exchange(fresh: Path, folder: Path) -> None:
    """Rename ``fresh`` to ``folder``; if that is killed, ``finish_exchange`` completes it.

    A folder that holds more than a saved drafter is kept beside it.
    """
    if folder.is_dir() and {file.name for file in folder.iterdir()} <= PARTS:
        (folder / UNFINISHED).touch()
        folder.rename(_set_aside(folder))
    else:
        keep_former(folder)
    fresh.rename(folder)
    (folder / UNFINISHED).unlink()
    _removed(_set_aside(folder))


PARTS = {CONFIG, WEIGHTS, CARD, UNFINISHED}
"""Files of a saved drafter; nothing else is ever removed."""


def finish_exchange(folder: Path) -> None:
    """Restore the old folder, or remove it, after an exchange that was killed; take the mark away.

    Raises:
        FalconLabError: what is there was not set aside by an exchange.
    """
    old, mark = _set_aside(folder), folder / UNFINISHED
    with about(folder):
        if not folder.exists() and (old / UNFINISHED).exists():
            old.rename(folder)
        if mark.exists():  # a folder of that name is whole
            mark.unlink()
    _removed(old)


def _removed(path: Path) -> Path:
    """Remove a folder that was marked for it, the mark last, or an empty one; return its path.

    Raises:
        FalconLabError: something else is there.
    """
    there = {file.name for file in path.iterdir()} if path.is_dir() else set[str]()
    if UNFINISHED in there or (path.is_dir() and not there):
        with suppress(OSError):
            for name in there & PARTS - {UNFINISHED}:
                (path / name).unlink()
            shutil.rmtree(path)
    elif os.path.lexists(path):
        raise FalconLabError(
            f"{path}: is in the way of saving a drafter; move it, or remove it if nobody needs it"
        )
    return path


def _whole(folder: Path) -> Path:
    """Return where a drafter lies: in its folder, or set aside where an exchange was killed."""
    old = _set_aside(folder)
    return old if not folder.exists() and (old / CONFIG).is_file() else folder


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
