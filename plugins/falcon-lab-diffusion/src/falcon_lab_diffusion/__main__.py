"""``python -m falcon_lab_diffusion trigrams``: a back-off trigram model of a corpus."""

from __future__ import annotations

from pathlib import Path

import click

from falcon_lab.cli import commands_of


@click.command()
@click.argument("target")
@click.argument("corpus")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--documents", type=click.IntRange(1), help="Of the training split, at most.")
@click.option(
    "--least",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Trigrams that are rarer are left out.",
)
def trigrams(target: str, corpus: str, out: Path, documents: int | None, least: int) -> None:
    """Count trigrams of CORPUS in TARGET's tokens, and write them to OUT as an ARPA file.

    TARGET is a name, a hub id, a folder or a GGUF file, of which the tokenizer alone counts; CORPUS
    is a name, or files, as data.corpus has them.
    """
    from falcon_lab.config.schema import TargetConfig
    from falcon_lab.data.corpora import corpus as documents_of
    from falcon_lab.data.encoding import encode_all
    from falcon_lab.files import check_place
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab_diffusion.trigrams import count_trigrams, write_arpa

    check_place(out, folder=False)
    tokenizer = ensure_target(TargetConfig(name=target)).tokenizer
    read = documents_of(corpus, split="train", limit=documents)
    model = count_trigrams((one.tokens for one in encode_all(read, tokenizer)), least=least)
    write_arpa(model, out)
    click.echo(f"{len(model.log_p):,} n-grams: {out}")


main = commands_of("falcon_lab_diffusion", trigrams, purpose="Make what paths are scored by.")


if __name__ == "__main__":
    main()
