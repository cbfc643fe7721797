from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from installing import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A place to install distributions, with its modules forgotten at the end."""
    folder = tmp_path / "site"
    folder.mkdir()
    made = Site(folder, monkeypatch)
    yield made
    made.forget()
