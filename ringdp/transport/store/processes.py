"""The ranks' processes: where each one is, as recorded in a store, and whether it is alive.

place/RANK   its pid, and an identifier shared by the processes that can see it
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from ringdp.transport.records import CLOSED, ELSEWHERE

ENDED, STOPPED = ("X", "Z"), ("T", "t")  # states of a process, as the kernel names them


def introduce(store: Store, rank: int) -> None:
    """Record where this process is."""
    store.set(f"place/{rank}", f"{os.getpid()} {_pid_namespace()}")


def pid_of(store: Store, rank: int) -> int:
    """Return a rank's pid, or ELSEWHERE if it is not visible from this process or not recorded."""
    pid, _, namespace = text_of(store, f"place/{rank}").partition(" ")
    known = pid.isdecimal() and len(pid) < 10 and namespace == _pid_namespace()
    return int(pid) if known else ELSEWHERE


def text_of(store: Store, key: str) -> str:
    """Return the key's value as text, empty if it is not set."""
    return store.get(key).decode(errors="replace") if store.check([key]) else ""


def process_state(pid: int) -> str:
    """Return why a rank's process does not run, empty if it does or cannot be seen."""
    if pid == CLOSED:
        return "it has closed"
    state = _state(pid)
    if state in ENDED:
        return f"process {pid} has ended"
    return f"process {pid} is stopped" if state in STOPPED else ""


def has_ended(pid: int) -> bool:
    return _state(pid) in ENDED


def _state(pid: int) -> str:
    """Return the kernel's letter for the process's state, empty if it cannot be seen."""
    if pid <= 0:
        return ""
    try:
        return stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return ENDED[0]
    except OSError:  # no descriptor left
        return ""


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, and so on.

    Raises OSError if there is no such process.
    """
    # The name may hold anything, and is cut after 15 bytes, perhaps within a character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def boot_id() -> str:
    """Return the unique id of this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _pid_namespace() -> str:
    """Return the boot and pid namespace, which processes that see one another share."""
    return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
