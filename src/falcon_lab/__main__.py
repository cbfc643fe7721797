"""``python -m falcon_lab`` is ``falcon-lab``."""

import signal


def main() -> None:
    """Run the command line."""
    # Until it can say more, Ctrl-C ends it as a program in C: with no traceback of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from falcon_lab.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
