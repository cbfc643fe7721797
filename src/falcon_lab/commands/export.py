"""``export``, ``import`` and ``push``: a drafter as other programs read it, back, and out."""

from __future__ import annotations

from pathlib import Path

import click

from falcon_lab.commands.arguments import (
    FOLDER,
    OVERRIDABLE,
    files,
    overrides_of,
    progress,
    quick_defaults,
    settings,
)
from falcon_lab.config.load import load_experiment
from falcon_lab.config.overrides import plain_overrides
from falcon_lab.config.saved import decoding_experiment, key_of, opened_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_place

DRAFTED = click.IntRange(1, 1000)

drafter_argument = click.argument("drafter", shell_complete=files)
overrides_argument = click.argument(
    "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[target.KEY=VALUE]..."
)


@click.command("export", context_settings=OVERRIDABLE)
@drafter_argument
@click.argument("out", type=FOLDER)
@click.option("--to", "name", required=True, help="vllm, speculators, sglang, …")
@click.option(
    "--draft-tokens",
    type=DRAFTED,
    default=4,
    show_default=True,
    help="Of a round, for the commands of its card and where the format says it.",
)
@click.option("--verify", is_flag=True, help="Write nothing; see whether OUT is what would be.")
@settings("target")
@overrides_argument
def export_command(
    drafter: str,
    out: Path,
    name: str,
    draft_tokens: int,
    verify: bool,
    target: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Write a saved drafter into OUT as another program reads it, with a card.

    DRAFTER is its folder or a name. The target must be there: formats take its sizes, its place,
    and rows of its LM head. With --verify, exit with 1 where OUT is something else.
    """
    from falcon_lab.drafters.saved import saved_node
    from falcon_lab.plugins.discovery import load_components

    components = load_components()
    given = overrides_of({"target": target}, overrides)
    experiment = decoding_experiment(drafter, given, quick_defaults("export"))
    with opened_drafter(drafter, components) as folder:
        components.export_format(saved_node(folder, components)["name"], name)
        if not verify:
            check_out(out, folder)

        from falcon_lab.export.folder import Export
        from falcon_lab.pretraining.target import (
            ensure_target,
            hub_id_of_target,
            place_of_target,
        )

        model = ensure_target(experiment.target, progress, components)
        place = place_of_target(experiment.target, components)
        published = hub_id_of_target(experiment.target, components)
        export = Export.of(folder, name, model, place, components, draft_tokens, published)
        if not verify:
            click.echo(f"wrote {export.write(out)} for {export.form.engines}")
            return
        lines = export.differences(out)
    for line in lines:
        click.echo(f"{out}: {line}")
    if not lines:
        click.echo(f"{out} is what would be written for {export.form.engines}")
    click.get_current_context().exit(1 if lines else 0)


def check_out(out: Path, source: Path) -> None:
    """Refuse a folder that cannot be written, or that is the one that is read.

    Raises:
        FalconLabError: with the reason.
    """
    check_place(out, folder=True)
    if out.resolve() == source.resolve():
        raise FalconLabError(f"{out}: is the folder that is read; choose another for the result")


@click.command("import", context_settings=OVERRIDABLE)
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--taps",
    help="Layers of the target that a stranger's drafter reads, as in 2,15,27 (0: the embeddings, "
    "i: what layer i puts out), where its folder does not say them.",
)
@settings("target")
@overrides_argument
def import_command(
    folder: Path, out: Path, taps: str | None, target: str | None, overrides: tuple[str, ...]
) -> None:
    """Make a saved drafter in OUT of a FOLDER that another program reads.

    What export has written comes back bit for bit; if it was changed since, as by other layer ids,
    it is refused with what is wrong. A drafter that somebody else has trained (EAGLE-1 and 3,
    Medusa, DFlash, a small model) needs --target, and is refused where no drafter here computes
    the same.
    """
    from falcon_lab.export.folder import import_drafter, is_ours, read_origin
    from falcon_lab.export.strangers import import_strangers, target_of
    from falcon_lab.plugins.discovery import load_components
    from falcon_lab.pretraining.target import ensure_target

    components = load_components()
    check_out(out, folder)
    given, layers = overrides_of({"target": target}, overrides), layers_of(taps)
    origin = read_origin(folder) if is_ours(folder) else None
    if origin is not None:
        place = origin.drafter["target"]
        known = {f"target.{k}": place[k] for k in ("name", "revision") if place.get(k) is not None}
    else:
        name = target_of(folder)
        known = {} if name is None else {"target.name": name}
        if not known and not any(key_of(word) == "target.name" for word in given):
            raise FalconLabError(
                f"{folder}: does not say which target its drafter was trained for; name it by "
                "--target"
            )
    experiment = load_experiment(
        None,
        given,
        known=[*quick_defaults("import"), *plain_overrides(known, str(folder))],
        components=components,
    )
    model = ensure_target(experiment.target, progress, components)
    if origin is not None:
        click.echo(f"wrote {import_drafter(folder, origin, out, model, components)}")
    else:
        made = import_strangers(folder, out, model, components, layers)
        click.echo(f"wrote {out}: {made}")


def layers_of(text: str | None) -> list[int] | None:
    """Return the numbers of layers that a user wrote; None where there are none.

    Raises:
        FalconLabError: they are no numbers.
    """
    if text is None:
        return None
    words = text.strip("[] ").split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise FalconLabError(f"--taps {text}: write numbers of layers with commas, as in 2,15,27")
    return [int(word) for word in words]


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("repository")
@click.option("--private", is_flag=True, help="Only you see a repository that is made.")
@click.option("--message", help="Of the commit.")
def push(folder: Path, repository: str, private: bool, message: str | None) -> None:
    """Send a FOLDER that export has written to the Hugging Face hub, with its card.

    REPOSITORY is its id there, as in me/eagle3-for-smollm2; it is made where it is not there.
    """
    from falcon_lab.export.hub import push_folder

    click.echo(f"sent to {push_folder(folder, repository, private=private, message=message)}")
