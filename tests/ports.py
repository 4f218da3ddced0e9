"""Ports for servers that are started later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unused_port() -> int:
    """One of the loopback, below those that the kernel gives to whoever asks for any: it does not
    get another user before its server starts."""
    lowest = int(GIVEN.read_text(encoding="utf-8").split()[0])
    while True:
        port = random.SystemRandom().randrange(1024, max(lowest, 2048))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
