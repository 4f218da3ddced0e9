"""Guards: errors for uses of a sharded model that would silently compute something else."""
