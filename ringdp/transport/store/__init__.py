"""What ranks without a common memory tell one another: through a store."""
