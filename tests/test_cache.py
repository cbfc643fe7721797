from __future__ import annotations

from pathlib import Path

import pytest

from falcon_lab.files import cache_folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FALCON_LAB_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"FALCON_LAB_CACHE": "~/own"}, Path("/home/ada/own")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/falcon-lab")),
        ({}, Path("/home/ada/.cache/falcon-lab")),
    ],
)
def test_the_cache_is_where_the_user_wants_it(
    environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FALCON_LAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == expected
