"""``dialogues``: an instruct target writes the chats that drafters for it are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from falcon_lab.commands.arguments import (
    COUNT,
    FILE,
    MOST,
    OVERRIDABLE,
    overrides_argument,
    overrides_of,
    progress,
    quick_defaults,
    settings,
)
from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import MOST_STEPS, Experiment, PromptsConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_place, locked, make_folder

if TYPE_CHECKING:
    from falcon_lab.data.dialogue_card import Card
    from falcon_lab.data.dialogue_rules import KeptOut
    from falcon_lab.data.dialogues import Dialogist

SHARE = click.FloatRange(0, 1)


@click.command(context_settings=OVERRIDABLE)
@settings("target")
@click.option(
    "--out", type=FILE, required=True, help="The file: x.jsonl, or x.jsonl.gz compressed."
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 10**12),
    default=100_000,
    show_default=True,
    help="Answer tokens to write.",
)
@click.option("--questions", type=FILE, help="Mix questions of this JSONL in: texts or chats.")
@click.option(
    "--share", type=SHARE, default=0.5, show_default=True, help="Of questions that are given."
)
@click.option(
    "--sampled",
    type=SHARE,
    default=0.0,
    show_default=True,
    help="Share of the answers that are sampled; the others are greedy.",
)
@click.option(
    "--temperature",
    type=float,
    default=1.0,
    show_default=True,
    help="Of questions and sampled answers.",
)
@click.option("--question-tokens", type=COUNT, default=128, show_default=True, help="At most.")
@click.option("--answer-tokens", type=COUNT, default=512, show_default=True, help="At most.")
@click.option("--batch", type=COUNT, default=64, show_default=True, help="Texts side by side.")
@click.option(
    "--part",
    type=click.IntRange(1, MOST_STEPS),
    default=256,
    show_default=True,
    help="Dialogues that are written down together; an interruption costs as many at the most.",
)
@click.option(
    "--keep-out",
    multiple=True,
    help="Prompts that no dialogue may hold: a set or a JSONL file, as evaluation.prompts.name.",
)
@settings("seed")
@overrides_argument
def dialogues(
    out: Path,
    tokens: int,
    questions: Path | None,
    keep_out: tuple[str, ...],
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Let an instruct target write training dialogues: questions behind its own chat template.

    Writes a JSONL of chats, which data.corpus reads, and a card beside it. The same command goes on
    where it stopped; with more --tokens it adds to the file. Other arguments are overrides, such as
    data.chat_template=FILE, evaluation.threads=1, or data.server.url=URL, which has a server write
    that runs the target. Without target.dtype it is what is fastest here, which a product tells:
    bfloat16 on a GPU and on most processors with AMX or AVX512-BF16, else float32.
    """
    from falcon_lab.data.corpora import SAMPLES

    known = quick_defaults("dialogues")
    experiment = load_experiment(None, overrides_of(options, overrides), known=known)
    if not out.name.endswith(SAMPLES):
        raise FalconLabError(f"--out {out}: must end in {' or '.join(SAMPLES)}")
    if experiment.evaluation.temperature == 0:
        raise FalconLabError("--temperature is 0, and questions are sampled; give one above 0")
    check_place(out, folder=False)
    dialogist = prepared(experiment, out, questions, keep_out, options)

    from falcon_lab.bars import Bar
    from falcon_lab.data.dialogues import open_card, write_dialogues
    from falcon_lab.timing import torch_threads

    dialogist.check()
    open_card(out, dialogist)  # what it refuses is refused before anything is made
    busy = f"{out}: another process writes it; wait for its end, or give another --out"
    with locked(make_folder(out.parent) / f".{out.name}.lock", busy=busy):
        card = open_card(out, dialogist)
        done = card.answer_tokens
        with (
            torch_threads(experiment.evaluation.threads),
            Bar(desc="dialogues", total=max(tokens, done), initial=done, unit="tok") as bar,
        ):

            def correct(card: Card) -> None:
                bar.n = card.answer_tokens

            write_dialogues(out, dialogist, card, tokens, bar.update, correct)
    click.echo(summary(card, out))


def prepared(
    experiment: Experiment,
    out: Path,
    questions: Path | None,
    keep_out: tuple[str, ...],
    options: dict[str, Any],
) -> Dialogist:
    """Return the target as one that writes dialogues.

    Raises:
        FalconLabError: what the user can mend.
    """
    from falcon_lab.data.dialogues import ChatForm, Dialogist, DialogueSettings, read_questions
    from falcon_lab.data.documents import load_template
    from falcon_lab.data.regeneration import served
    from falcon_lab.measure.prompts import check_prompts
    from falcon_lab.plugins.discovery import load_components
    from falcon_lab.pretraining.target import target_ahead

    chosen = DialogueSettings(
        seed=experiment.evaluation.seed,
        temperature=experiment.evaluation.temperature,
        sampled=options["sampled"],
        given=options["share"],
        question_tokens=options["question_tokens"],
        answer_tokens=options["answer_tokens"],
        batch_size=options["batch"],
        part=options["part"],
    )
    if experiment.target.dtype == "auto":
        experiment.target.dtype = dtype_of(out, experiment.target.device)
    template = load_template(experiment.data.chat_template)
    asked = [] if questions is None else read_questions(questions)
    for name in keep_out:
        check_prompts(PromptsConfig(name=name))
    components = load_components()
    ahead = target_ahead(experiment.target, progress, components)
    ChatForm.of(ahead.target, template)
    target = ahead.itself(experiment.target, progress, components)
    kept_out = kept_out_of(experiment, keep_out, target.tokenizer)
    form, engine = ChatForm.of(target, template), served(target, experiment.data)
    return Dialogist(target, form, chosen, asked, kept_out, engine)


def dtype_of(out: Path, device: str) -> str:
    """Return the type that a file was begun in, or for a new one that which is fastest here."""
    from falcon_lab.config.schema import dtype_name
    from falcon_lab.data.dialogue_card import Card, card_path
    from falcon_lab.model.loading import resolve_device
    from falcon_lab.model.precision import fastest_dtype

    begun = Card.read(out).settings.get("dtype") if card_path(out).exists() else None
    return begun or dtype_name(fastest_dtype(resolve_device(device)))


def kept_out_of(experiment: Experiment, names: tuple[str, ...], tokenizer: Any) -> KeptOut:
    """Return the prompts of sets by name, none of which a dialogue may hold.

    Raises:
        FalconLabError: one cannot be read.
    """
    from falcon_lab.data.dialogue_rules import KeptOut
    from falcon_lab.measure.prompts import load_prompts

    data, sets = experiment.data, {}
    for name in dict.fromkeys([*with_sources(), *names]):
        chosen = PromptsConfig(name=name, limit=MOST)
        found = load_prompts(chosen, corpus=data.corpus, tokenizer=tokenizer, seed=data.seed)
        sets[Path(name).name] = [turn for prompt in found for turn in prompt.turns]
    return KeptOut.of(sets)


def with_sources() -> list[str]:
    """Return the sets that are always kept out: those that need neither a file nor a network."""
    from falcon_lab.data.corpora import standard_library

    try:
        standard_library()
    except FalconLabError:  # a Python without them is not evaluated on them
        return []
    return ["stdlib"]


def summary(card: Card, out: Path) -> str:
    """Return what was written and what was left out, a line each."""
    from falcon_lab.data.dialogue_card import card_path

    rate = card.answer_tokens / max(card.seconds, 1e-9)
    sets = ", ".join(f"{name} ({count})" for name, count in card.kept_out.items())
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(card.dropped.items()))
    return (
        f"{out}: {card.dialogues:,} dialogues, {card.answer_tokens:,} answer tokens "
        f"({rate:.0f} a second)\n"
        f"dropped: {dropped or 'none'}\n"
        f"no prompt of these is in it: {sets}\n"
        f"card: {card_path(out)}"
    )
