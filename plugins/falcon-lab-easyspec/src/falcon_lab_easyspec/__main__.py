"""``python -m falcon_lab_easyspec``: groups of layers on several devices, or what they would cost.

    python -m falcon_lab_easyspec costs TARGET
    torchrun --nproc-per-node 2 -m falcon_lab_easyspec processes TARGET "A prompt"

The first is a model, from parts that are timed on one device; the second computes.
"""

from __future__ import annotations

import os
from dataclasses import replace

import click

from falcon_lab.cli import commands_of
from falcon_lab.config.schema import TargetConfig
from falcon_lab_easyspec import SIZE, EasySpecConfig

COUNT = click.IntRange(1, 10**6)


@click.command()
@click.argument("target")
@click.option("--devices", type=COUNT, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--size", type=COUNT, default=SIZE, show_default=True, help="Layers of a group.")
@click.option(
    "--gather", type=click.FloatRange(0), default=20.0, show_default=True, help="µs of a gather."
)
@click.option(
    "--context", type=COUNT, default=256, show_default=True, help="Tokens in the KV cache."
)
@click.option("--dtype", default="auto", show_default=True, help="Of the weights.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=1.0, show_default=True, help="For each timing."
)
def costs(
    target: str,
    devices: tuple[int, ...],
    size: int,
    gather: float,
    context: int,
    dtype: str,
    seconds: float,
) -> None:
    """Time the parts of a drafting pass here, and print what it would cost on several devices.

    TARGET is a name, a hub id, a folder or a GGUF file; --devices may be given several times.
    """
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab_easyspec.costs import ASSUMPTIONS, measured, table
    from falcon_lab_easyspec.groups import plan_of, stages

    found = ensure_target(TargetConfig(name=target, dtype=dtype, lean=True))
    layers = found.config.num_hidden_layers
    groups = plan_of(EasySpecConfig(size=size), layers).groups
    parts = replace(measured(found, context=context, seconds=seconds), gather=1e-6 * gather)
    for line in (ASSUMPTIONS, *table(parts, stages(groups, layers), devices)):
        click.echo(line)


@click.command()
@click.argument("target")
@click.argument("prompt")
@click.option("--size", type=COUNT, help="Layers of a group.")
@click.option("--depth", type=COUNT, default=4, show_default=True, help="Draft tokens of a round.")
@click.option("--tokens", type=COUNT, default=64, show_default=True, help="New tokens.")
def processes(target: str, prompt: str, size: int | None, depth: int, tokens: int) -> None:
    """Continue PROMPT greedily on all processes; the first one prints text and speed.

    TARGET is a name, a hub id, a folder or a GGUF file.
    """
    import torch

    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab_easyspec.processes import connected, report

    local = os.environ.get("LOCAL_RANK", "0")
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    with connected(torch.device(device)) as all_of_them:
        found = ensure_target(TargetConfig(name=target, device=device, lean=True))
        config = EasySpecConfig(size=size)
        for line in report(found, prompt, config, all_of_them, depth=depth, tokens=tokens):
            if all_of_them.rank == 0:
                click.echo(line)


main = commands_of(
    "falcon_lab_easyspec", costs, processes, purpose="Compute attentions on several devices."
)


if __name__ == "__main__":
    main()
