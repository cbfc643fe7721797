"""Have vLLM write the hidden states that a training asks for, in float32; runs in its environment.

PYTHON states_in_vllm.py FOLDER OUT.json [off-by-one]

With ``off-by-one`` the layers below the right ones are written, under the right ones' names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def plant(folder: Path, layers: list[int]) -> None:
    """Call the layers of files by other names."""
    from safetensors.torch import load_file

    from falcon_lab.data.state_files import STATES, TOKENS, write_states

    for path in folder.glob("*.safetensors"):
        found = load_file(path)
        write_states(folder, found[TOKENS].tolist(), found[STATES], layers)


def main(folder: Path, out: Path, off_by_one: bool) -> None:
    """Extract, and say with what and how long it took, start included."""
    from falcon_lab_serving.extract import extract

    from falcon_lab.data.state_files import asked_for

    wanted, texts = asked_for(folder)
    began = time.perf_counter()
    layers = [layer - 1 for layer in wanted.layers] if off_by_one else wanted.layers
    extract(wanted.target, folder, texts, layers, dtype="float32")
    seconds = time.perf_counter() - began
    if off_by_one:
        plant(folder, wanted.layers)
    known = ("vllm", "vllm-cpu", "torch", "transformers")
    versions = {each.metadata["Name"]: each.version for each in distributions()}
    told = {"seconds": seconds, "versions": {k: versions[k] for k in known if k in versions}}
    out.write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "off-by-one" in sys.argv)
