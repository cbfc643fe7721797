"""A Hugging Face hub on this machine: as much of its HTTP interface as an upload needs."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """What was sent to it.

    Attributes:
        repositories: id -> whether it is private.
        files: id -> path -> content.
        messages: of the commits.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.paths: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(body)

    def read(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        self.server.paths.append(f"GET {self.path}")
        self.answer({"sha": "0" * 40, "siblings": [], "id": self.path.split("models/")[-1]})

    def do_POST(self) -> None:
        body = self.read()
        self.server.paths.append(f"POST {self.path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            hidden = bool(wanted.get("private")) or wanted.get("visibility") == "private"
            self.server.repositories.setdefault(name, hidden)
            self.answer({"url": f"{self.server.address}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            self.commit(body)
        else:
            self.answer({"error": f"nothing at {self.path}"}, 404)

    def commit(self, body: bytes) -> None:
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        there = self.server.files.setdefault(name, {})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.server.messages.append(entry["value"]["summary"])
            else:
                there[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        address = f"{self.server.address}/{name}/commit/{'1' * 40}"
        self.answer({"commitUrl": address, "commitOid": "1" * 40, "success": True})

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that runs until the block ends."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
