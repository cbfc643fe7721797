"""``python -m falcon_lab_aded build``: a table of tri-grams from a corpus."""

from __future__ import annotations

from pathlib import Path

import click

from falcon_lab.cli import commands_of


@click.command()
@click.argument("corpus")
@click.option(
    "--target", required=True, help="A target by name, a hub id, a folder or a GGUF file."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The table."
)
@click.option("--documents", type=click.IntRange(1), help="Of the training split, at most.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of their choice.")
@click.option(
    "--successors",
    type=click.IntRange(1, 2**20),
    default=12,
    show_default=True,
    help="Of two tokens that are kept, the most frequent.",
)
@click.option("--chat-template", help="As data.chat_template.")
def build(
    corpus: str,
    target: str,
    out: Path,
    documents: int | None,
    seed: int,
    successors: int,
    chat_template: str | None,
) -> None:
    """Count the tri-grams of CORPUS: a name, or files, as data.corpus has them.

    Its training split is counted, of which no held-out prompt is. Of the target the tokenizer alone
    counts. The same command goes on where it stopped.
    """
    from falcon_lab.bars import Bar
    from falcon_lab.config.schema import TargetConfig
    from falcon_lab.data.documents import load_template
    from falcon_lab.files import check_place
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab_aded.counting import Sample, build_table

    check_place(out, folder=False)
    template = load_template(chat_template)
    found = ensure_target(TargetConfig(name=target))
    sample = Sample(corpus, documents, seed, successors, template)
    with Bar(desc="counting", total=documents, unit="doc") as bar:
        table, there = build_table(sample, found.tokenizer, found.vocab_size, out, bar.update)
    click.echo(
        f"{out}: {len(table):,} pairs of tokens with what follows them, of "
        f"{int(table.facts['tokens']):,} tokens in {int(table.facts['documents']):,} documents"
        + (" (was there already)" if there else "")
    )


main = commands_of("falcon_lab_aded", build, purpose="Make what the drafter aded searches.")


if __name__ == "__main__":
    main()
