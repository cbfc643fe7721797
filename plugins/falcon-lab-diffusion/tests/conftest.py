"""The tests read the sources and cases beside them, and those of sps, installed or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).parent
SPS = HERE.parents[1] / "falcon-lab-sps" / "src"
sys.path[:0] = [str(HERE.parent / "src"), str(SPS), str(HERE)]
