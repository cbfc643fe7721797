"""Where things that are made once are kept: the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$FALCON_LAB_CACHE``, else ``$XDG_CACHE_HOME/falcon-lab``, else ``~/.cache/falcon-lab``."""
    if chosen := os.environ.get("FALCON_LAB_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "falcon-lab"
