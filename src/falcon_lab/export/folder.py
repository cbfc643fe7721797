"""Folders of other programs' formats: written, compared, and read back.

Beside what the other program reads, a folder of ours has ``falcon_lab.json``: what the drafter was
here, its own card, and the sizes of all files. So a folder that was copied in part is known for
one, and a drafter that comes back is what it was, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.saved import DESCRIPTION, read_description
from falcon_lab.drafters.saved import (
    CARD,
    WEIGHTS,
    check_state,
    check_trained_for,
    load_drafter,
    read_state,
    saved_node,
    write_state,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.export.card import export_card
from falcon_lab.files import about
from falcon_lab.folders import UNFINISHED, replacing_folder
from falcon_lab.interfaces import BuildContext, Exported, ExportFormat, TrainedDrafter
from falcon_lab.stored import read_bounded, read_json

if TYPE_CHECKING:
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components

ORIGIN = "falcon_lab.json"
"""What a folder of a format was made from."""
VERSION = 1
"""Of that file."""
AGAIN = "export the drafter again, or copy the folder again"


@dataclass(frozen=True)
class Origin:
    """What a folder of a format was made from.

    Attributes:
        version: of this description.
        format: its name.
        place: where the target was.
        draft_tokens: of the export.
        drafter: the description of the saved drafter.
        card: its README.md.
        files: name -> bytes, of all other files.
    """

    version: int
    format: str
    place: str
    draft_tokens: int
    drafter: dict[str, Any]
    card: str
    files: dict[str, int]


@dataclass(frozen=True)
class Export:
    """A saved drafter that is to be written in a format.

    Attributes:
        name: of the format.
        form: the format.
        trained: what it reads.
        description: of the saved drafter.
        card: its README.md.
        published: the target's hub id, for the card; None where there is none.
    """

    name: str
    form: ExportFormat
    trained: TrainedDrafter
    description: Mapping[str, Any]
    card: str
    published: str | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        name: str,
        target: Target,
        place: str,
        components: Components,
        draft_tokens: int,
        published: str | None = None,
    ) -> Export:
        """Read a saved drafter.

        Args:
            folder: of the drafter.
            name: of the format.
            target: that it was trained for.
            place: where other programs find the target.
            components: know the drafter's kind.
            draft_tokens: of a chain.
            published: the target's hub id, for the card; None where there is none.

        Raises:
            FalconLabError: the format is none of such a drafter's; or as ``load_drafter``.
        """
        node = saved_node(folder, components)
        form = components.export_format(node["name"], name)
        drafter = load_drafter(folder, target, components)
        config, state = components.options("drafter", node), read_state(folder / WEIGHTS)
        trained = TrainedDrafter(config, drafter, state, target, place, draft_tokens)
        card = read_bounded(folder / CARD).decode(errors="replace")
        return cls(name, form, trained, read_description(folder), card, published)

    def mapped(self) -> Exported:
        """Return what the folder holds, which leads back to the same weights.

        Raises:
            FalconLabError: the format has no words for something of the drafter.
        """
        made = self.form.write(self.trained)
        back = self.form.read(made, replace(self.trained, tensors={}))
        if found := list(different_tensors(back, self.trained.tensors)):
            raise RuntimeError(f"the format {self.name} loses something of a drafter: {found[0]}")
        return made

    def write(self, out: Path) -> Path:
        """Write the folder, in place of a former one.

        Raises:
            FalconLabError: as ``mapped``; or it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        made = self.mapped()
        with replacing_folder(out, also=(SafetensorError,)) as fresh:
            # A target's tied tables are one tensor, which the format has twice.
            tensors = {name: each.contiguous().clone() for name, each in made.tensors.items()}
            save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
            for name, content in made.others.items():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / name).write_bytes(content)
            card = export_card(self.form, self.trained, self.description, self.card, self.published)
            (fresh / CARD).write_text(card, "utf-8")
            (fresh / DESCRIPTION).write_text(json.dumps(made.config, indent=2) + "\n", "utf-8")
            origin = json.dumps(asdict(self._origin(fresh)), indent=2)
            (fresh / ORIGIN).write_text(origin + "\n", "utf-8")
        return out

    def _origin(self, folder: Path) -> Origin:
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        sizes = {str(e.relative_to(folder)): e.stat().st_size for e in files}
        sizes.pop(UNFINISHED, None)
        trained = self.trained
        return Origin(
            VERSION,
            self.name,
            trained.place,
            trained.draft_tokens,
            dict(self.description),
            self.card,
            sizes,
        )

    def differences(self, folder: Path) -> list[str]:
        """Return what of a folder is not what would be written, a line each.

        Raises:
            FalconLabError: the folder cannot be read.
        """
        made, found = self.mapped(), read_exported(folder)
        lines = [*different_values(found.config, made.config, "")]
        lines += different_tensors(found.tensors, made.tensors)
        for name, content in made.others.items():
            if found.others.get(name) != content:
                lines.append(f"{name} is another")
        return lines


def different_values(found: Any, expected: Any, key: str) -> Iterator[str]:
    """Yield where plain values differ, by key."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in dict.fromkeys([*expected, *found]):
            inner = f"{key}.{name}" if key else name
            yield from different_values(found.get(name), expected.get(name), inner)
    elif found != expected:
        yield f"{key} is {found!r}, and should be {expected!r}"


def different_tensors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield where weights differ, bit for bit, by name."""
    for name in sorted({*found, *expected}):
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is one too many"
        elif not _same(found[name], expected[name]):
            yield f"{name} has other weights"


def _same(found: Any, expected: Any) -> bool:
    import torch

    return found.dtype == expected.dtype and torch.equal(found, expected)


def read_exported(folder: Path) -> Exported:
    """Read a folder of a format.

    Raises:
        FalconLabError: it is none, or was written or copied in part.
    """
    origin = read_origin(folder)
    known = {CARD, DESCRIPTION, WEIGHTS}
    others = {n: read_bounded(folder / n) for n in origin.files if n not in known}
    config = read_json(
        folder / DESCRIPTION, dict[str, Any], "configuration of an exported drafter", AGAIN
    )
    return Exported(config, read_state(folder / WEIGHTS), others)


def is_ours(folder: Path) -> bool:
    """Return whether export has written a folder, or began to.

    Raises:
        FalconLabError: it cannot be read.
    """
    with about(folder, "read"):
        return (folder / ORIGIN).exists() or (folder / UNFINISHED).exists()


def read_origin(folder: Path) -> Origin:
    """Return what a folder of a format was made from.

    Raises:
        FalconLabError: it is none of ours, or was written or copied in part.
    """
    path = folder / ORIGIN
    with about(folder, "read"):
        if (folder / UNFINISHED).exists():
            raise FalconLabError(f"{folder}: was not written to its end; {AGAIN}")
        if not path.exists():
            raise FalconLabError(
                f"{folder}: has no {ORIGIN}, so that falcon-lab export did not write it; name a "
                "folder that it wrote"
            )
        found = read_json(path, Origin, "description of an exported drafter", AGAIN)
        if found.version != VERSION:
            raise FalconLabError(
                f"{path}: has version {found.version}, and {VERSION} is read; install the "
                "falcon-lab that wrote it"
            )
        for name, size in found.files.items():
            _check_file(folder, name, size)
    return found


def _check_file(folder: Path, name: str, size: int) -> None:
    """See that a file is there, in the folder and whole; texts may have been edited."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise FalconLabError(f"{folder / ORIGIN}: {name} is no file of the folder; {AGAIN}")
    if not (folder / name).is_file():
        raise FalconLabError(f"{folder / name} is missing; {AGAIN}")
    if name not in (DESCRIPTION, CARD) and (folder / name).stat().st_size != size:
        raise FalconLabError(f"{folder / name} is not whole; {AGAIN}")


def import_drafter(
    folder: Path, origin: Origin, out: Path, target: Target, components: Components
) -> Path:
    """Make the saved drafter again that a folder of a format was made from.

    Args:
        folder: of the format.
        origin: what it was made from.
        out: of the drafter.
        target: that it was trained for.
        components: know the drafter's kind.

    Raises:
        FalconLabError: the folder is not whole, or says something else than the drafter that it
            was made from; the target is another one, or nothing here knows such a drafter.
    """
    description = origin.drafter
    check_trained_for(folder, description["target"], target)
    node = components.recorded("drafter", description["drafter"], description["provenance"])
    form = components.export_format(node["name"], origin.format)
    exported, config = read_exported(folder), components.options("drafter", node)
    drafter = components.build("drafter", node, BuildContext(host=target))
    bare = TrainedDrafter(config, drafter, {}, target, origin.place, origin.draft_tokens)
    try:
        state = form.read(exported, bare)
    except FalconLabError as error:
        raise FalconLabError(f"{folder}: {error}") from error
    trained = replace(bare, tensors=state)
    again = Export(origin.format, form, trained, description, origin.card)
    if lines := again.differences(folder):
        raise FalconLabError(f"{folder}: {lines[0]}; {AGAIN}")
    check_state(state, drafter, folder / WEIGHTS)
    return write_state(out, state, description, origin.card)
