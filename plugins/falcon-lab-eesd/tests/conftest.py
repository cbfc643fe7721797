"""The tests read the sources and cases beside them, installed or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]
