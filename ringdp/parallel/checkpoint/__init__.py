"""Checkpoints: every rank writes its own shards, any number of ranks in any stage reads them."""
