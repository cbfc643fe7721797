"""What every test runs under: no network, no accounts, and ``tiny_models`` importable."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["WANDB_MODE"] = "disabled"  # it takes seconds to start; a test that wants it says so
os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

# The first example pays for imports and warm-up, so time limits would be flaky; the same examples
# every time make a failure one that everybody sees.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_runtest_setup() -> None:
    """Only this machine can be reached: gloo and data loaders talk over local sockets."""
    from pytest_socket import socket_allow_hosts

    socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)


def pytest_collection_finish() -> None:
    """What all tests share is no garbage, and is not looked through for any again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin first, so that nobody waits for one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder of the person who runs the tests is neither read nor written."""
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _signals_as_at_a_terminal() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and what ignores a signal is not ended by it."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def sample_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample distribution, built as a wheel and installed into a folder of its own."""
    sample = Path(__file__).parent / "sample_plugin"
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = ["wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(sample)]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    [wheel] = wheels.glob("falcon_lab_sample-*.whl")
    put = ["install", *offline, "--target", str(target), str(wheel)]
    subprocess.run([*pip, *put], check=True, capture_output=True)
    return target
