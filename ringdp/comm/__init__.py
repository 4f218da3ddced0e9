"""The user's API: communicators, their collectives and their work handles."""

from ringdp.comm.communicator import Communicator
from ringdp.comm.rendezvous import communicator_of, init
from ringdp.comm.tracing import trace
from ringdp.comm.work import Work
from ringdp.transport.base import Link

__all__ = ["Communicator", "Link", "Work", "communicator_of", "init", "trace"]
