"""Optimizers of sharded parameters: AdamW, states of whole parameters, clipping, loss scaling."""
