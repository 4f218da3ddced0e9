"""What moves where: collective algorithms as data. Pure; needs no device and no process."""
