"""Checkpoints: every rank writes its own shards, any number of ranks in any stage reads them."""

from ringdp.parallel.checkpoint.export import export
from ringdp.parallel.checkpoint.load import load
from ringdp.parallel.checkpoint.save import save

__all__ = ["export", "load", "save"]
