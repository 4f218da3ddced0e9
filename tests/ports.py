"""Ports for servers that are started later, and the sockets of this process."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

LISTENING, CONNECTED = "0A", "01"  # TCP states in /proc/net/tcp
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unused_port() -> int:
    """A free port of the loopback, below the kernel's ephemeral range, so that no other process is
    assigned it before its server starts."""
    lowest = int(EPHEMERAL.read_text(encoding="utf-8").split()[0])
    while True:
        port = random.SystemRandom().randrange(1024, max(lowest, 2048))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def sockets(state: str) -> list[tuple[str, str]]:
    """This process's sockets in that state: local and remote address, in hexadecimal."""
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it
            links.add(os.readlink(link))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
            _, here, there, its, *_, inode = line.split()[:10]
            if its == state and f"socket:[{inode}]" in links:
                found.append((here, there))
    return found
