"""Collectives that a device runs: in the order of the calls, on streams, and watched."""
