"""Collective algorithms as data: what moves where. Pure Python; needs no device and no process."""

from ringdp.schedule.algorithms import ALGORITHMS, Collective, schedule
from ringdp.schedule.contracts import Contract, contract
from ringdp.schedule.custom import Builder, proved
from ringdp.schedule.draw import grid, svg
from ringdp.schedule.ir import Schedule, Transfer
from ringdp.schedule.liveness import fifo_depth
from ringdp.schedule.program import Program, Row, fuse, project
from ringdp.schedule.replay import html
from ringdp.schedule.verify import verify

__all__ = [
    "ALGORITHMS",
    "Builder",
    "Collective",
    "Contract",
    "Program",
    "Row",
    "Schedule",
    "Transfer",
    "contract",
    "fifo_depth",
    "fuse",
    "grid",
    "html",
    "project",
    "proved",
    "schedule",
    "svg",
    "verify",
]
