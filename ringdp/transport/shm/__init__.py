"""Shared memory as a transport: csrc/ runs the programs of the ranks of one host."""
