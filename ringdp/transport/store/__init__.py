"""What ranks without shared memory exchange through a store."""
