"""Collectives that run on a device: in call order, on streams, under a watchdog thread."""
