"""What a user holds: a communicator, its collectives and their work handles."""

from ringdp.comm.communicator import Communicator
from ringdp.comm.rendezvous import init, over, world
from ringdp.comm.work import Work

__all__ = ["Communicator", "Work", "init", "over", "world"]
