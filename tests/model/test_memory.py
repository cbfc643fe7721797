"""What memory is free, and models that do not fit, before their weights are made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from falcon_lab.errors import FalconLabError
from falcon_lab.model import memory
from falcon_lab.model.memory import GIB, check_room, free_memory
from tiny_models import tiny_config

CPU = torch.device("cpu")

# --- what is free --------------------------------------------------------------------------------


def system(root: Path, *, available: int, groups: str = "0::/\n", **files: str) -> Path:
    """A system's files; ``_`` in a name stands for ``/``, ``-`` for ``.``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {available} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def free_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> int | None:
    monkeypatch.setattr(memory, "SYSTEM", root)
    return free_memory(CPU)


def test_the_machine_s_available_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert free_of(system(tmp_path, available=700), monkeypatch) == 700 * 1024


def test_a_control_group_leaves_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory.max": "max\n",
        "memory.current": "9000\n",
        "jobs__memory.max": "5000\n",
        "jobs__memory.current": "3000\n",
        "jobs__memory.stat": "anon 2500\ninactive_file 400\n",
        "jobs__mine__memory.max": "max\n",
    }
    root = system(tmp_path, available=700, groups="0::/jobs/mine\n", **files)
    assert free_of(root, monkeypatch) == 5000 - 3000 + 400


def test_so_does_one_of_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory__memory.limit_in_bytes": str(2**63 - 4096),  # no limit
        "memory__memory.usage_in_bytes": "10",
        "memory__memory.stat": "",
        "memory__box__memory.limit_in_bytes": "5000",
        "memory__box__memory.usage_in_bytes": "4500",
        "memory__box__memory.stat": "cache 1\ntotal_inactive_file 30\n",
    }
    groups = "5:cpu:/box\n4:memory:/box\n"
    root = system(tmp_path, available=700, groups=groups, **files)
    assert free_of(root, monkeypatch) == 530


def test_what_torch_holds_of_a_gpu_and_does_not_use_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    assert free_memory(torch.device("cuda")) == 1400


def test_where_nobody_tells_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert free_of(tmp_path, monkeypatch) is None
    assert free_memory(torch.device("meta")) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not tell")
def test_this_machine_has_memory() -> None:
    free = free_memory(CPU)
    assert free is not None
    assert free > 2**20


# --- models -------------------------------------------------------------------------------------


def check(**shape: Any) -> None:
    config = tiny_config("llama", **shape)
    check_room(config, partial(AutoModel.from_config, config), "drafter.layers")


def test_a_model_that_does_not_fit_is_refused_with_its_size_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: GIB)
    state = torch.get_rng_state()
    with pytest.raises(
        FalconLabError, match=r"^drafter\.layers: the model takes 2\d\.\d GiB, and 1 GiB"
    ):
        check(hidden=8192, layers=10)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_that_fits_and_a_small_one_are_not() -> None:
    check(hidden=1024, layers=2)
    check()


def test_layers_beyond_counting_are_refused_at_once() -> None:
    with pytest.raises(FalconLabError, match=r"drafter\.layers: 10000000 layers; at most 1000"):
        check(layers=10_000_000)
