from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from falcon_lab.cli import main
from falcon_lab.commands.answering import Stream, summary
from falcon_lab.decoding.generation import Generation, Round, Seconds
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.plugins.discovery import load_components
from saved_models import save_untrained
from tiny_models import save_tiny, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and an untrained drafter that was saved for it."""
    from falcon_lab.config.load import load_experiment
    from falcon_lab.model.loading import load_target

    target_folder = save_tiny(tmp_path_factory.mktemp("target"))
    experiment = load_experiment(None, [f"target.name={target_folder}"])
    target = load_target(experiment.target)
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    return target_folder, save_untrained(folder, target, load_components(), card="# Untrained")


def call(*arguments: str, input: str | None = None) -> Result:
    result = CliRunner().invoke(main, ["generate", *arguments], input=input)
    assert result.exit_code == 0, result.output
    return result


def test_a_saved_drafter_writes_what_the_target_alone_writes(folders: tuple[Path, Path]) -> None:
    target, drafter = folders
    fast = call("--drafter", str(drafter), "--prompt", "def add", "--max-new-tokens=12")
    plain = call("--target", str(target), "--max-new-tokens", "12", input="def add")
    assert fast.stdout == plain.stdout
    assert fast.stdout.strip()
    assert "τ" in fast.stderr
    assert "τ" not in plain.stderr


def test_trees_and_other_overrides_are_understood(folders: tuple[Path, Path]) -> None:
    _, drafter = folders
    common = ["--drafter", str(drafter), "--prompt", "a", "--max-new-tokens", "6"]
    chain = call(*common, "--tree", "chain", "--tree.depth=2")
    static = call(*common, "--tree=static")
    assert chain.stdout == static.stdout


def test_one_seed_gives_one_text(folders: tuple[Path, Path]) -> None:
    target, _ = folders
    common = ["--target", str(target), "--prompt", "a", "--temperature", "1"]
    texts = [call(*common, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def stream(text: str, drafted: int, *, color: bool, capsys: pytest.CaptureFixture[str]) -> str:
    tokenizer = tiny_target().tokenizer
    written = Stream(StopCondition((), (), tokenizer), color=color)
    written.on_round(tokenizer(text)["input_ids"], drafted, None, None)
    written.finish()
    return capsys.readouterr().out


def test_accepted_draft_tokens_are_coloured(capsys: pytest.CaptureFixture[str]) -> None:
    expected = click.style("ab", fg="green") + "c\n"
    assert stream("abc", 2, color=True, capsys=capsys) == expected
    assert stream("abc", 2, color=False, capsys=capsys) == "abc\n"


def test_a_character_is_written_when_its_last_byte_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Bytes:
        def decode(self, tokens: list[int], **options: bool) -> str:
            return bytes(tokens).decode("utf-8", errors="replace")

    written = Stream(StopCondition((), (), Bytes()), color=False)
    for byte in "aé".encode():
        written.on_round([byte], 0, None, None)
        assert "\N{REPLACEMENT CHARACTER}" not in capsys.readouterr().out
    written.finish()
    assert written.seconds > 0


def test_the_summary_counts_with_and_without_the_bonus_token() -> None:
    rounds = [Round(nodes=4, depth=4, passes=2, accepted=a, emitted=a + 1) for a in (1, 3)]
    line = summary(Generation([1] * 7, "length", rounds), seconds=2.0)
    assert line.endswith(", τ 3.00 with the bonus token, 2.00 without]")


def test_the_speed_is_all_tokens_over_all_seconds_however_short_the_text() -> None:
    rounds = [Round(nodes=0, depth=0, passes=0, accepted=0, emitted=1)]
    seconds = Seconds(prefill=0.9, total=0.1)
    line = summary(Generation([1, 2], "eos", rounds, seconds), seconds=1.0)
    assert line == "[2 tokens in 1 s (0.9 s of prefill): 2.0 tokens/s, ended by eos]"
    assert "1 tokens in 0.5 s" in summary(Generation([1], "eos", [], seconds), seconds=0.5)
