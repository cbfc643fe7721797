"""``python -m falcon_lab_serving extract``: vLLM writes the hidden states that a training wants."""

from __future__ import annotations

import os
from pathlib import Path

import click

from falcon_lab.cli import commands_of
from falcon_lab.errors import FalconLabError


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", help="Folder or hub id, in place of the one that the training named.")
@click.option("--dtype", default="auto", show_default=True, help="vLLM's, and that of the files.")
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Devices that share the target.",
)
def extract(folder: Path, target: str | None, dtype: str, tensor_parallel: int) -> None:
    """Have vLLM write the states that a training with data.extracted_states=FOLDER has asked for.

    Texts whose files are there are left out, so that the same command goes on where it stopped. It
    runs in vLLM's environment.
    """
    from falcon_lab.data.state_files import asked_for

    wanted, texts = asked_for(folder)
    if texts:
        # The connector's errors reach us where it runs in this process.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from falcon_lab_serving import extract as vllm

        vllm.extract(
            target or wanted.target,
            folder,
            texts,
            wanted.layers,
            dtype=dtype,
            tensor_parallel=tensor_parallel,
        )
    left = len(asked_for(folder)[1])
    if left:
        raise FalconLabError(
            f"{folder}: vLLM has read {len(texts)} texts, and {left} have no file; look at what it "
            "said, and give the same command again"
        )
    click.echo(f"{folder}: {len(texts)} files written, none is missing")


main = commands_of("falcon_lab_serving", extract, purpose="Have servers work for a training.")


if __name__ == "__main__":
    main()
