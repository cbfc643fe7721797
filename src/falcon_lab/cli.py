"""The command line: ``falcon-lab`` and ``python -m falcon_lab``.

What every command shares: errors in one line, exit codes, and quiet libraries. The commands
themselves stand in ``falcon_lab.commands``.

Exit codes: 0 all is well; 1 a check failed, or a bug, which leaves its traceback; 2 an error that
the user can mend, in one line (``--traceback`` shows where it comes from); 3 the doctor found
something to mend; 129, 130, 143 SIGHUP, SIGINT (Ctrl-C) or SIGTERM; 141 nobody reads the output.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import IO, Any

import click

from falcon_lab import __version__
from falcon_lab.commands.data import data
from falcon_lab.commands.decode import check, generate
from falcon_lab.commands.dialogues import dialogues
from falcon_lab.commands.doctor import doctor
from falcon_lab.commands.export import export_command, import_command, push
from falcon_lab.commands.measure import bench, tune
from falcon_lab.commands.plan import plan
from falcon_lab.commands.plugins import new_plugin, plugins
from falcon_lab.commands.quiet import third_party_tips_silenced
from falcon_lab.commands.run import compare, evaluate, run, view_data
from falcon_lab.commands.search import search
from falcon_lab.commands.signals import Ended, ending_signals_raised
from falcon_lab.commands.streams import (
    READER_LEFT,
    discard_output,
    make_streams_safe,
    reader_left,
)
from falcon_lab.environment import check_environment
from falcon_lab.errors import FalconLabError, PluginWarning
from falcon_lab.files import explain
from falcon_lab.plugins.culprits import blame, speaker

RESUMABLE = ("run", "compare", "dialogues", "data")
"""Commands that go on where they stopped when they are given again."""


TRACEBACK = "--traceback"
"""Shows how an error that the user can mend came about; may stand behind the command too."""


class MendableError(click.ClickException):
    """Show a ``FalconLabError`` in one line and exit with 2.

    Args:
        message: the line.
        original: what was raised, to be shown with all that led to it; None shows the line alone.
    """

    exit_code = 2

    def __init__(self, message: str, original: Exception | None = None) -> None:
        super().__init__(message)
        self._original = original

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr, in a line of its own."""
        end_bars()
        if self._original is not None:
            click.echo("".join(traceback.format_exception(self._original)), err=True)
        click.echo(f"falcon-lab: {self.format_message()}", err=True)


class Commands(click.Group):
    """Turn what the user can mend, signals and closed pipes into a line and an exit code."""

    def main(self, *arguments: Any, **named: Any) -> Any:
        """Run the command line, with streams that take every character.

        Raises:
            SystemExit: with the exit code.
        """
        make_streams_safe()
        return super().main(*arguments, **named)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``--traceback`` from wherever it stands."""
        if TRACEBACK in args:
            args = [TRACEBACK, *(word for word in args if word != TRACEBACK)]
        self._refuse_empty(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_empty(self, ctx: click.Context, args: list[str]) -> None:
        """Refuse ``run ""`` and ``--target ""``: what a variable leaves that is not set."""
        name = next((word for word in args if not word.startswith("-")), "")
        command = self.get_command(ctx, name)
        options = {text for each in command.params for text in each.opts} if command else set()
        for before, word in pairwise(["", *args]):
            option = before if word == "" else word.removesuffix("=")
            if word == "" or (word.endswith("=") and option in options):
                what = option if option in options else f"an argument of {name or 'falcon-lab'}"
                raise MendableError(
                    f"{what} is empty, as where a variable is not set; give it a value or leave "
                    "it out (--help shows what there is)"
                )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command, until it ends or is ended."""
        say = partial(say_ended, ctx)
        try:
            with ending_signals_raised(say), plug_ins_blamed():
                return super().invoke(ctx)
        except Ended as ended:
            say(ended)
            ctx.exit(ended.exit_code)
        except BrokenPipeError:
            if not reader_left():  # a pipe of our own: a bug
                raise
            discard_output()
            ctx.exit(READER_LEFT)
        except (FalconLabError, OSError) as error:
            if isinstance(error, ConnectionError):
                raise
            line = str(error) if isinstance(error, FalconLabError) else explain(error)
            shown = error if ctx.params.get("with_traceback") else None
            raise MendableError(" ".join(line.split()), shown) from error


@contextmanager
def plug_ins_blamed() -> Iterator[None]:
    """Name the plug-in whose code ends a command: in an error's line, or below a bug's traceback.

    Raises:
        FalconLabError: a plug-in left by ``SystemExit``, or the system refused it something.
    """
    try:
        yield
    except (ConnectionError, click.ClickException, click.exceptions.Exit):
        raise
    except FalconLabError as error:
        if owner := speaker(error):
            raise FalconLabError(f"{error} (said by {owner})") from error
        raise
    except BaseException as error:
        if line := blame(error):
            if isinstance(error, KeyboardInterrupt | OSError | SystemExit):
                raise FalconLabError(line) from error
            error.add_note(f"falcon-lab: {line}")
        raise


def say_ended(ctx: click.Context, ended: Ended) -> None:
    """Name the signal that ended the command, and how to go on."""
    end_bars()
    resumes = ctx.invoked_subcommand in RESUMABLE
    again = "; the same command goes on where it stopped" if resumes else ""
    click.echo(f"falcon-lab: ended by {ended.name}{again}", err=True)


def end_bars() -> None:
    """End the lines of progress bars that are still open."""
    if "falcon_lab.bars" in sys.modules:  # which takes tqdm, and the time to import it
        sys.modules["falcon_lab.bars"].close_bars()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="falcon-lab")
@click.option(TRACEBACK, "with_traceback", is_flag=True, help="Show how an error came about.")
@click.pass_context
def main(ctx: click.Context, with_traceback: bool) -> None:
    """Train speculative-decoding drafters and measure them honestly."""
    check_environment()
    ctx.with_resource(third_party_tips_silenced())
    ctx.with_resource(warnings.catch_warnings())
    warnings.simplefilter("once", PluginWarning)
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning):  # a line for the user, no line of our source
            click.echo(f"falcon-lab: warning: {message}", err=True)
        else:
            others(message, category, *place, **more)

    warnings.showwarning = show


def commands_of(package: str, *commands: click.Command, purpose: str) -> Commands:
    """Return a distribution's own command line, with our messages, exit codes and signals.

    Args:
        package: what ``python -m`` is called with.
        commands: its commands.
        purpose: of them all, a sentence.
    """
    return Commands(
        package, commands=commands, params=main.params, callback=main.callback, help=purpose
    )


for command in (
    *(run, evaluate, compare, generate, check, bench, tune, search),
    *(plan, plugins, new_plugin, doctor, view_data, dialogues, data),
    *(export_command, import_command, push),
):
    main.add_command(command)
