from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.stored import read_json


@dataclass
class Target:
    name: str
    revision: str | None = None


@dataclass
class Saved:
    format: int
    target: Target
    node: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Saved:
    return read_json(path, Saved, "saved drafter", "save it again")


def test_fields_become_the_dataclass_and_unknown_keys_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('\ufeff{"format": 1, "target": {"name": "${oc.env:HOME}"}, "later": [1]}')
    assert read(path) == Saved(1, Target("${oc.env:HOME}"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not whole JSON"),
        ('{"format": 1', "not whole JSON"),
        ("null", "must be an object"),
        ('"text"', "must be an object"),
        ("[]", "must be an object"),
        ("{}", "format: the field is required"),
        ('{"format": 1, "target": null}', "target: must be an object"),
        ('{"format": 1, "target": {"name": 3}}', "target.name: must be a valid string"),
        ('{"format": "1", "target": {"name": "a"}}', "format: must be a valid integer"),
        ('{"format": NaN}', "not whole JSON"),
        ('{"format": 1, "target": {"name": "\\ud83d"}}', "not whole JSON"),
        ("[" * 100_000 + "]" * 100_000, "recursion limit"),
        ('{"format": ' + "9" * 10_000 + "}", "out of range"),
    ],
)
def test_what_is_none_names_file_field_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(FalconLabError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: no saved drafter (")
    assert said in str(caught.value)
    assert str(caught.value).endswith("; save it again")


def test_bytes_that_are_no_text_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(FalconLabError, match="not whole JSON"):
        read(path)
    with pytest.raises(FalconLabError, match=r"cannot be read .*Is a directory"):
        read(tmp_path)
    with pytest.raises(FalconLabError, match="No such file"):
        read(tmp_path / "missing.json")
