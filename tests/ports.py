"""Ports for servers that are started later, and what a process has open."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

LISTENS, CONNECTED = "0A", "01"  # states, as the kernel numbers them
GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unused_port() -> int:
    """One of the loopback, below those that the kernel gives to whoever asks for any: it does not
    get another user before its server starts."""
    lowest = int(GIVEN.read_text(encoding="utf-8").split()[0])
    while True:
        port = random.SystemRandom().randrange(1024, max(lowest, 2048))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def sockets(state: str) -> list[tuple[str, str]]:
    """This process's in that state: the addresses here and there, in hexadecimal."""
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads close theirs
            links.add(os.readlink(link))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
            _, here, there, its, *_, inode = line.split()[:10]
            if its == state and f"socket:[{inode}]" in links:
                found.append((here, there))
    return found
