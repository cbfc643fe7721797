"""Save and load a drafter: ``config.json``, ``model.safetensors`` and ``README.md`` in a folder.

Nothing is ever unpickled. A folder replaces a former one whole (``folders.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from falcon_lab import __version__
from falcon_lab.config.saved import (
    DESCRIPTION,
    FORMAT,
    opened_drafter,
    read_description,
)
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.files import about
from falcon_lab.folders import replacing_folder, whole
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
    return write_state(Path(folder), state, describe(node, provenance, target), card, dtype)


def save_as(folder: Path, dtype: str) -> bool:
    """Write a saved drafter's weights in another precision; return whether that was to be done.

    Args:
        folder: as ``save_drafter`` wrote it.
        dtype: "auto" leaves them as they are.

    Raises:
        FalconLabError: a file of it is damaged, or it cannot be written.
    """
    there = whole(folder, CONFIG)
    config, state = read_config(folder), read_state(there / WEIGHTS)
    wanted = {name: _stored(weights, dtype).dtype for name, weights in state.items()}
    if all(weights.dtype == wanted[name] for name, weights in state.items()):
        return False
    write_state(folder, state, config, read_bounded(there / CARD).decode(errors="replace"), dtype)
    return True


def _stored(weights: Tensor, dtype: str) -> Tensor:
    """Return weights in the precision in which they are saved; whole numbers stay what they are."""
    import torch

    if dtype == AS_TRAINED or not weights.is_floating_point():
        return weights
    return weights.to(getattr(torch, dtype))


def write_state(
    folder: Path,
    state: Mapping[str, Tensor],
    description: Mapping[str, Any],
    card: str,
    dtype: str = AS_TRAINED,
) -> Path:
    """Write a drafter of which all is known: weights, content of ``config.json``, card.

    Raises:
        FalconLabError: it cannot be written; what was there is still there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    saved = {name: _stored(weights, dtype).contiguous() for name, weights in state.items()}
    with replacing_folder(folder, also=(SafetensorError,)) as fresh:
        save_file(saved, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CARD).write_text(card, "utf-8")
        (fresh / CONFIG).write_text(json.dumps(description, indent=2) + "\n", "utf-8")
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
        FalconLabError: as ``read_drafter``.
    """
    drafter = read_drafter(folder, target, components, force=force)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def read_drafter(
    folder: Path | str, target: Target, components: Components, *, force: bool = False
) -> Any:
    """Build a drafter as a training does, with the weights that were saved.

    Args:
        folder: as ``save_drafter`` wrote it.
        target: what it is to draft for.
        components: knows the drafter's kind.
        force: take it for a target that it was not trained for.

    Raises:
        FalconLabError: a file is missing or damaged, the drafter's plug-in is not installed, it
            was trained for another target, or its draft vocabulary is of another vocabulary.
    """
    folder = whole(Path(folder), CONFIG)
    config = read_config(folder)
    trained_for = config["target"]
    if not force:
        check_trained_for(folder, trained_for, target)
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
    return drafter


def check_trained_for(folder: Path, trained_for: Mapping[str, Any], target: Target) -> None:
    """See that a saved drafter was trained for a target.

    Args:
        folder: is named in the error.
        trained_for: the target of its description.
        target: that it is to draft for.

    Raises:
        FalconLabError: it was trained for another.
    """
    if trained_for["fingerprint"] != target.fingerprint:
        raise FalconLabError(
            f"{folder}: this drafter was trained for {trained_for['name']} with fingerprint "
            f"{trained_for['fingerprint']}; {target.name} has {target.fingerprint}. Load that "
            "target, or distil a drafter for this one"
        )


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
    folder = whole(folder, CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise FalconLabError(f"{folder / WEIGHTS} is missing; save the drafter again")
    refuse_other_sizes(folder, stand_in, "hidden_size")


def refuse_other_sizes(folder: Path, host: Any, *sizes: str) -> None:
    """Refuse a saved drafter whose target had other sizes, where the weights are not compared.

    Args:
        folder: of the drafter.
        host: the target, with a ``name``.
        sizes: which are compared, as targets and descriptions name them.

    Raises:
        FalconLabError: one of them is another.
    """
    trained_for = read_config(folder)["target"]
    for key in sizes:
        before, now = trained_for.get(key), getattr(host, key)
        if before not in (None, now):
            raise FalconLabError(
                f"{folder}: this drafter was trained for {trained_for.get('name')}, whose {key} is "
                f"{before}; {host.name} has {now}. Name its own target"
            )


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read a saved drafter's ``config.json``: node, provenance and the target it was trained for.

    Raises:
        FalconLabError: it is missing or is not one of ours.
    """
    return read_description(whole(Path(folder), CONFIG))


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


def refuse_other_node(folder: Path | str, node: Mapping[str, Any], components: Components) -> None:
    """Refuse a saved drafter of another kind or with other options.

    Args:
        folder: as ``save_drafter`` wrote it.
        node: the kind and options, defaults and all.
        components: the registry.

    Raises:
        FalconLabError: as ``saved_node``; or something differs.
    """
    there = components.check("drafter", saved_node(folder, components), str(Path(folder) / CONFIG))
    for key in dict.fromkeys([*node, *there]):
        if node.get(key) != there.get(key):
            raise FalconLabError(
                f"{folder}: {key} of this drafter is {there.get(key)}, and drafter.{key} is "
                f"{node.get(key)}; give both the same"
            )


def describe(
    node: Mapping[str, Any], provenance: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    """Return the content of a saved drafter's ``config.json``."""
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


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file.

    Raises:
        FalconLabError: it is missing or damaged.
    """
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
    state = read_state(path)
    check_state(state, drafter, path)
    try:
        drafter.load_state_dict(state)
    except FalconLabError as error:
        raise FalconLabError(f"{path}: {error}") from None


def check_state(state: Mapping[str, Tensor], drafter: nn.Module, path: Path) -> None:
    """See that weights are those of a drafter.

    Args:
        state: the weights.
        drafter: was built by its description.
        path: where they were read.

    Raises:
        FalconLabError: they are not.
    """
    if reason := _misfit(state, drafter.state_dict()):
        raise FalconLabError(
            f"{path} does not fit its {CONFIG}: {reason}; copy both again, or save it again"
        )


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
