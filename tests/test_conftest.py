"""The suite's own promises: nothing but this machine is reached."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from pytest_socket import SocketConnectBlockedError


def test_other_machines_cannot_be_reached() -> None:
    with socket.socket() as outside, pytest.raises(SocketConnectBlockedError):
        outside.connect(("192.0.2.1", 80))


def test_sockets_on_this_machine_work_for_process_groups(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(os.path.relpath(tmp_path / "s"))
        local.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(local.getsockname())


def test_the_hub_is_offline_and_the_tracker_is_off() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["WANDB_MODE"] == "disabled"
