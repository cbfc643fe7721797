from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from running import command, environment

SAYS = """
from falcon_lab.commands.streams import make_streams_safe
make_streams_safe()
print('— τ × 🧟 \\ud83d')
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_no_encoding_ends_a_command(encoding: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", SAYS],
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0"),
        capture_output=True,
    )
    assert (said.returncode, said.stderr) == (0, b"")
    assert b"\\ud83d" in said.stdout


def test_a_closed_output_is_no_error_and_its_number_goes_to_no_file(tmp_path: Path) -> None:
    shell = f"{' '.join(command('new-plugin', 'quiet', '--into', tmp_path))} >&- 2>&- <&-"
    assert subprocess.run(["sh", "-c", shell], env=environment()).returncode == 0
    written = {file.name: file.read_text() for file in tmp_path.rglob("*.*") if file.is_file()}
    assert "pyproject.toml" in written
    assert not any(
        "next: pip install" in text for name, text in written.items() if "md" not in name
    )


def test_a_reader_who_leaves_ends_the_command_without_a_word() -> None:
    shell = f"{' '.join(command('plugins', '--json'))} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
