"""``python -m falcon_lab_gsd saving``: what merging saves, on a target and a drafter."""

from __future__ import annotations

import click

from falcon_lab.cli import commands_of


@click.command()
@click.argument("target")
@click.option(
    "--drafter",
    required=True,
    help="A node as in YAML: '{name: saved, path: RUN/drafter}', '{name: sps, model: HUB_ID}'.",
)
@click.option("--corpus", default="generated", show_default=True, help="As data.corpus.")
@click.option("--prompts", type=click.IntRange(1, 10**6), default=8, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1, 10**6), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(1, 10**6), default=64, show_default=True)
@click.option("--set", "given", multiple=True, metavar="KEY=VALUE", help="An option of the tree.")
def saving(
    target: str,
    drafter: str,
    corpus: str,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
    given: tuple[str, ...],
) -> None:
    """Continue held-out documents greedily, merging by R = never, 0, 1 and 2, and print the work.

    TARGET is a name, a hub id, a folder or a GGUF file.
    """
    from itertools import islice

    import torch

    from falcon_lab.config.schema import TargetConfig
    from falcon_lab.data.corpora import corpus as documents_of
    from falcon_lab.data.encoding import encode_all
    from falcon_lab.fields import options, parse_value
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab.testing import build_drafter
    from falcon_lab_gsd import GsdConfig
    from falcon_lab_gsd.saving import lines, savings

    values = {key: parse_value(value) for key, _, value in (word.partition("=") for word in given)}
    config = options(GsdConfig, values, "tree")
    found = ensure_target(TargetConfig(name=target, lean=True))
    made = build_drafter(found, parse_value(drafter))
    documents = islice(documents_of(corpus, split="heldout"), prompts)
    texts = [
        torch.tensor(one.tokens[:prompt_tokens], device=found.device)
        for one in encode_all(documents, found.tokenizer)
    ]
    with torch.inference_mode():
        for line in lines(savings(found, made, texts, config, new=tokens)):
            click.echo(line)


main = commands_of("falcon_lab_gsd", saving, purpose="Show what the draft graph is worth.")


if __name__ == "__main__":
    main()
