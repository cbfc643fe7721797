"""The errors that a user can mend."""


class FalconLabError(Exception):
    """Something the user can mend.

    The message says what is wrong, where, and what to do; the command line prints it in one line,
    without a traceback, and exits with 2.
    """


class PluginWarning(UserWarning):
    """A plug-in was left out, and why."""
