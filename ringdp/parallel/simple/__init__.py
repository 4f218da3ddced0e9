"""Data parallelism before DDP, small enough to compare with it: one process that copies its model,
and a parameter server."""

from ringdp.parallel.simple.naive import DataParallel
from ringdp.parallel.simple.server import SERVER, RemoteOptimizer, serve, serve_each

__all__ = ["SERVER", "DataParallel", "RemoteOptimizer", "serve", "serve_each"]
