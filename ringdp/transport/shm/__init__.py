"""The shared-memory transport: csrc/ runs the programs of the ranks of one host."""
