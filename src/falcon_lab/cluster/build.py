"""Make the data of an experiment on a Ray cluster: first texts that are missing, then features."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from falcon_lab import __version__
from falcon_lab.bars import Bar
from falcon_lab.cluster.handing_out import Crew
from falcon_lab.cluster.worker import FEATURES, TEXTS, DataWorker, Place
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError, first_line
from falcon_lab.files import cache_folder, make_folder, write_atomically

LOCAL = "local"
"""Address of a cluster that is begun on this machine, and ends with the command."""
UNITS = {TEXTS: "text", FEATURES: "sequence"}
PATIENCE = 10.0
"""Seconds within which a cluster must answer."""


def build_data(
    experiment: Experiment, address: str, actors: int | None, announce: Callable[[str], None]
) -> None:
    """Have a cluster write what the experiment's data stage needs.

    Args:
        experiment: whose data.
        address: of the cluster, as Ray has it, or ``LOCAL``.
        actors: processes; None is one a GPU, or one a machine where there are none.
        announce: is called with one line for the user.

    Raises:
        FalconLabError: Ray is not installed, the cluster is not there or too small, a machine has
            another version or cannot read the shared folders, the data cannot be made, or all
            actors have died. What was written is there.
    """
    with cluster(address) as ray:
        crew = Crew(ray, started(ray, experiment, actors), announce)
        with signed_place(experiment) as place:
            versions = crew.ask_all("greet", place)
        if other := {name: each for name, each in versions.items() if each != __version__}:
            raise FalconLabError(
                f"--ray: falcon-lab is {__version__} here and {next(iter(other.values()))} at "
                f"{next(iter(other))}; install the same version on all machines"
            )
        for kind in (TEXTS, FEATURES):
            units = crew.ask_one(kind)
            announce(f"{kind}: {len(units):,} units to write by {len(crew)} actors")
            with Bar(total=sum(each.size for each in units), desc=kind, unit=UNITS[kind]) as bar:
                crew.hand_out(units, lambda unit, bar=bar: bar.update(unit.size))  # type: ignore[misc]
        for line in crew.ask_one("finish"):
            announce(line)


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """Connect to a cluster, and yield the module of Ray.

    Raises:
        FalconLabError: Ray is not installed, or nothing answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise FalconLabError(
            f"--ray: ray cannot be imported ({first_line(error)}); install falcon-lab[ray]"
        ) from error
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        quiet |= {"num_cpus": max(2, os.cpu_count() or 1), "include_dashboard": False}
    else:
        check_address(address)
    ended = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **quiet)
        signal.signal(signal.SIGTERM, ended)  # which Ray has taken
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise unreachable(address, error) from error
    try:
        yield ray
    finally:
        leave(ray, ended)


def leave(ray: Any, ended: Any) -> None:
    """Let a cluster go, and have SIGTERM received as before.

    Ray gives the signal back to the system on its way, which would end the process without a word
    where it comes again meanwhile.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        ray.shutdown()
        signal.signal(signal.SIGTERM, ended)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def check_address(address: str) -> None:
    """See that something listens at an address; Ray itself tries for minutes.

    Raises:
        FalconLabError: nothing does, or it is none.
    """
    if address == "auto":
        return
    found = re.fullmatch(r"(?:ray://)?([^\s:/]+):(\d{1,5})", address)
    if found is None:
        raise FalconLabError(
            f"--ray {address}: no address of a cluster; give HOST:PORT, ray://HOST:PORT, auto for "
            f"the one of this machine, or {LOCAL}"
        )
    try:
        socket.create_connection((found[1], int(found[2])), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, error) from error


def unreachable(address: str, error: Exception) -> FalconLabError:
    """Return that no cluster answers."""
    return FalconLabError(
        f"--ray {address}: no cluster answers ({first_line(error):.200}); begin one by ray start "
        f"--head, or give {LOCAL}"
    )


def started(ray: Any, experiment: Experiment, wanted: int | None) -> dict[str, Any]:
    """Start the actors, a GPU each where there are any.

    Raises:
        FalconLabError: there are not so many GPUs or processors.
    """
    resources = ray.cluster_resources()
    gpus, processors = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    count = wanted or gpus or max(1, len(ray.nodes()))
    most, what = (gpus, "GPUs") if gpus else (processors, "processors")
    if count > most:
        raise FalconLabError(f"--actors {count}: the cluster has {most} {what}; name no more")
    kind = ray.remote(DataWorker).options(num_cpus=1, num_gpus=1 if gpus else 0, max_restarts=0)
    return {f"actor {number}": kind.remote(experiment) for number in range(1, count + 1)}


@contextmanager
def signed_place(experiment: Experiment) -> Iterator[Place]:
    """Yield where actors must find what is here, by a file that is there for so long.

    Raises:
        FalconLabError: it cannot be written.
    """
    store = experiment.data.feature_store
    folder = make_folder(Path(store) if store else cache_folder()).resolve()
    content = secrets.token_hex(16)
    sign = write_atomically(folder / f".cluster-{os.getpid()}", content)
    try:
        yield Place(str(Path.cwd()), str(cache_folder().resolve()), str(sign), content)
    finally:
        sign.unlink(missing_ok=True)
