"""``python -m falcon_lab_ffn_skip profile``: what skipping costs a target."""

from __future__ import annotations

from pathlib import Path

import click

from falcon_lab.cli import commands_of

LONGEST = 1024
"""Tokens of a text that are read."""


@click.command()
@click.argument("target")
@click.argument("texts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--first", type=click.IntRange(0), help="Cold layers at the bottom.")
@click.option("--last", type=click.IntRange(0), help="Cold layers at the top.")
def profile(target: str, texts: tuple[Path, ...], first: int | None, last: int | None) -> None:
    """Print the cosines of all layers, and what thresholds cost and save.

    TARGET is a name, a hub id, a folder or a GGUF file; TEXTS are UTF-8 files, a text each.
    """
    import torch

    from falcon_lab.config.schema import TargetConfig
    from falcon_lab.errors import FalconLabError
    from falcon_lab.files import about
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab_ffn_skip import FfnSkipConfig
    from falcon_lab_ffn_skip.profile import tables

    read = []
    for path in texts:
        with about(path, "read", also=(UnicodeDecodeError,)):
            read.append(path.read_text("utf-8"))
    found = ensure_target(TargetConfig(name=target, lean=True))
    encoded = [torch.tensor(found.tokenizer(text)["input_ids"][:LONGEST]) for text in read]
    encoded = [text.to(found.device) for text in encoded if len(text) > 1]
    if not encoded:
        raise FalconLabError(f"{texts[0]}: none of the texts has two tokens; name longer ones")
    for line in tables(found, encoded, FfnSkipConfig(first=first, last=last)):
        click.echo(line)


main = commands_of("falcon_lab_ffn_skip", profile, purpose="Show what skipping costs a target.")


if __name__ == "__main__":
    main()
