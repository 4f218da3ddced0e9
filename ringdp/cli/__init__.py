"""The `ringdp` command."""
