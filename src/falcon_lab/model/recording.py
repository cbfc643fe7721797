"""Capturing device work once and replaying it: CUDA graphs behind a small protocol.

What is captured reads and writes tensors that stay where they are; a replay does the same kernels
on whatever these hold by then, and costs the host one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from falcon_lab.errors import first_line
from falcon_lab.interfaces import Announce, Outputs, Recorder, Run

WARM_UPS = 2
"""Runs before a capture, as ``torch.cuda.graph`` asks: libraries set themselves up in the first."""


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what captures on a device, if anything does."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """CUDA graphs of one device, which share their memory.

    A replay may overwrite the outputs of another one: read them before the next replay.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.CUDAGraph | None = None  # kept: their memory goes with the last one

    def capture(self, run: Run) -> Run:
        """Capture, as a ``Recorder`` does."""
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(here):  # back to it, come what may
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads (loggers, data loaders) may call CUDA meanwhile.
            pool = None if self._first is None else self._first.pool()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = run()
            self._first = self._first or graph

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _warm_up(self, run: Run) -> None:
        """Run on a stream of its own, where waiting for the host is found and harms no capture."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
            with refusing_waits():
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Let every operation that waits for the device raise an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Attempts:
    """Tries to capture until it fails once.

    Attributes:
        failed: whether it has; nothing is captured from then on.

    Args:
        name: of what is captured, for the user.
        recorder: captures.
        announce: is called with one line for the user: that and why it failed.
    """

    def __init__(self, name: str, recorder: Recorder, announce: Announce) -> None:
        self.failed = False
        self._name = name
        self._recorder = recorder
        self._announce = announce

    def capture(self, run: Run) -> Run | None:
        """Return the replay, or None where there can be none."""
        if self.failed:
            return None
        try:
            return self._recorder.capture(run)
        except Exception as error:  # whatever CUDA or a model's modules throw
            self.failed = True
            reason = first_line(error)
            self._announce(f"{self._name}: no CUDA graphs, decoding continues without ({reason})")
            return None
