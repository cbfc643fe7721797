"""Save and load a drafter: ``config.json``, ``model.safetensors`` and ``README.md`` in a folder.

Nothing is ever unpickled. A folder is written beside its place and renamed, so that what was
there stays whole until the new one is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab import __version__
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext

if TYPE_CHECKING:
    from torch import nn

    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FORMAT = 1


def save_drafter(
    folder: Path | str,
    drafter: nn.Module,
    *,
    node: Mapping[str, Any],
    provenance: Mapping[str, Any],
    target: Target,
    card: str,
) -> Path:
    """Write a drafter, replacing one that may be there.

    Args:
        folder: where to.
        drafter: its weights are saved; the target's are not among them.
        node: the component's YAML node, from which it can be built again.
        provenance: name, distribution and version of the component.
        target: what it was trained for.
        card: the model card, Markdown.

    Raises:
        FalconLabError: it cannot be written; what was there is still there.
    """
    folder = Path(folder)
    _finish_exchange(folder)
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        _write_weights(fresh / WEIGHTS, drafter)
        (fresh / CARD).write_text(card, "utf-8")
        config = _describe(node, provenance, target)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        _exchange(fresh, folder)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        _finish_exchange(folder)
        raise FalconLabError(
            f"cannot write the drafter into {folder} ({error}); what was there is unchanged"
        ) from error
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
        FalconLabError: a file is missing or damaged, the drafter's plug-in is not installed, or
            it was trained for another target.
    """
    folder = Path(folder)
    _finish_exchange(folder)
    config = read_config(folder)
    trained_for = config["target"]
    if trained_for["fingerprint"] != target.fingerprint and not force:
        raise FalconLabError(
            f"{folder}: this drafter was trained for {trained_for['name']} with fingerprint "
            f"{trained_for['fingerprint']}; {target.name} has {target.fingerprint}. Load that "
            "target, or force it (its drafts will rarely be accepted)"
        )
    drafter = components.build("drafter", config["drafter"], BuildContext(host=target))
    _read_weights(folder / WEIGHTS, drafter)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read a saved drafter's ``config.json``: node, provenance and the target it was trained for.

    Raises:
        FalconLabError: it is missing or is not one of ours.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
        complete = {"drafter", "provenance", "target"} <= config.keys()
    except FileNotFoundError:
        raise FalconLabError(f"{folder}: no saved drafter here ({CONFIG} is missing)") from None
    except (OSError, ValueError, AttributeError) as error:
        raise FalconLabError(f"{path}: cannot be read ({error}); save the drafter again") from None
    if not complete or config.get("format") != FORMAT:
        raise FalconLabError(
            f"{path}: not the configuration of a drafter that falcon-lab {__version__} can read"
        )
    return config


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


def _write_weights(path: Path, drafter: nn.Module) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
    try:
        save_file(state, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what a full disk raises here
        raise OSError(str(error)) from error


def _read_weights(path: Path, drafter: nn.Module) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except FileNotFoundError:
        raise FalconLabError(f"{path} is missing; save the drafter again") from None
    except (SafetensorError, OSError) as error:
        raise FalconLabError(
            f"{path} is damaged or cut short ({error}); copy it again, or save the drafter again"
        ) from None
    try:
        drafter.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise FalconLabError(f"{path} does not fit its {CONFIG}: {reason}") from None


def _exchange(fresh: Path, folder: Path) -> None:
    """Rename ``fresh`` to ``folder``; if that is killed, ``_finish_exchange`` completes it."""
    if folder.exists():
        folder.rename(_set_aside(folder))
    fresh.rename(folder)
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def _finish_exchange(folder: Path) -> None:
    """Restore the old folder, or remove it, after an exchange that was killed."""
    old = _set_aside(folder)
    if not old.exists():
        return
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(folder)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
