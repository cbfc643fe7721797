"""The ``lightning`` command: ``lightning run X.yaml`` is ours, all else is handed on.

Several distributions install a command of this name, and the last one installed owns the file. Ours
handles exactly the calls that no other understands, and passes the rest to the other owner as they
came. ``falcon-lab run X.yaml`` is the same, under a name that no other package has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

OURS = "falcon-lab"
PREFERRED = "lightning-sdk"
"""The owner that the others forward to themselves."""

USAGE = """\
usage: lightning run EXPERIMENT.yaml [key=value ...] [--dry-run]
       the same as falcon-lab run; all commands: falcon-lab --help"""


def main() -> None:
    """Run the experiment, or hand the call on with ``sys.argv`` untouched."""
    arguments = sys.argv[1:]
    if is_ours(arguments):
        from falcon_lab.__main__ import main as falcon_lab

        falcon_lab()
    elif other := other_owner():
        sys.exit(other())
    elif "--help" in arguments or "-h" in arguments:
        sys.stdout.write(USAGE + "\n")
    else:
        sys.stderr.write(USAGE + "\n")
        sys.exit(2)


def is_ours(arguments: Sequence[str]) -> bool:
    """Return whether the call is ``run`` with a YAML as its first positional argument."""
    if not arguments or arguments[0] != "run":
        return False
    positional = next((word for word in arguments[1:] if not word.startswith("-")), "")
    return positional.endswith((".yaml", ".yml"))


def other_owner() -> Callable[[], Any] | None:
    """Return the ``lightning`` command of another installed distribution, or None."""
    from importlib.metadata import entry_points  # costs more than all the rest of this file

    found = entry_points(group="console_scripts", name="lightning")
    # Distribution names are compared as pip does: lightning_sdk is lightning-sdk.
    owners = {e.dist.name.lower().replace("_", "-"): e for e in found if e.dist is not None}
    owners.pop(OURS, None)
    if not owners:
        return None
    chosen = owners.get(PREFERRED) or owners[min(owners)]
    command: Callable[[], Any] = chosen.load()
    return command
