"""The ranks' processes: where they are, as said through a store, and what keeps them from going on.

place/RANK   its process, and what the processes that can see it have in common
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from ringdp.errors import UsageError
from ringdp.transport.records import CLOSED, ELSEWHERE

ENDED, STOPPED = ("X", "Z"), ("T", "t")  # states of a process, as the kernel names them


def introduce(store: Store, rank: int) -> None:
    """Say where this process is."""
    store.set(f"place/{rank}", f"{os.getpid()} {_sight()}")


def pid_of(store: Store, rank: int) -> int:
    """ELSEWHERE where its process cannot be seen from here, or is not known."""
    pid, _, sight = text_of(store, f"place/{rank}").partition(" ")
    known = pid.isdecimal() and len(pid) < 10 and sight == _sight()
    return int(pid) if known else ELSEWHERE


def text_of(store: Store, key: str) -> str:
    """Empty where there is none."""
    return store.get(key).decode(errors="replace") if store.check([key]) else ""


def check_process(pid: int) -> None:
    """Raise UsageError in a process forked from `pid`, whose communicator it is."""
    if os.getpid() != pid:
        raise UsageError(
            f"this communicator belongs to process {pid}; process {os.getpid()}, forked from it, "
            "cannot use it"
        )


def process_state(pid: int) -> str:
    """What keeps a rank's process from going on; empty if nothing does."""
    if pid == CLOSED:
        return "it has closed"
    state = _state(pid)
    if state in ENDED:
        return f"process {pid} has ended"
    return f"process {pid} is stopped" if state in STOPPED else ""


def has_ended(pid: int) -> bool:
    return _state(pid) in ENDED


def _state(pid: int) -> str:
    """Empty for what stands for a process that cannot be seen."""
    if pid <= 0:
        return ""
    try:
        return stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return ENDED[0]
    except OSError:  # no descriptor to look through
        return ""


def stat(pid: int) -> list[str]:
    """The words of /proc/PID/stat after the name: its state, its parent, and so on. Raises
    OSError where there is none."""
    # The name may hold anything, and ends where 15 bytes do: also within a character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def _sight() -> str:
    """What the processes that see one another have in common: the boot, and their numbering."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
